"""A run whose prompts the launcher feeds: what it is told, what is kept for it, and when groups start."""

from pathlib import Path
from typing import Any

import pytest

from fa_rollout.config import from_dict
from fa_rollout.hub.hub import Hub
from fa_rollout.hub.io.event_log import EventLog
from fa_rollout.hub.requests.fed import FedStream
from fa_rollout.hub.state.world import Attachment
from shm import RingTable
from trainer_hook import messages as m

READY = m.GeneratorReady(incarnation=1, num_prompts=0, engines=[], spans=False, concurrency=8)


class Mail:
    """Takes what the hub sends."""

    def __init__(self) -> None:
        self.generator: list[m.Message] = []
        self.launcher: list[m.Message] = []

    def to_rank(self, rank: Attachment, message: m.Message) -> None:
        raise AssertionError("there is no rank")

    def to_generator(self, message: m.Message) -> None:
        self.generator.append(message)

    def to_launcher(self, message: m.Message) -> None:
        self.launcher.append(message)

    def end(self, exit_code: int, text: str) -> None:
        raise AssertionError(text)

    def started(self) -> list[tuple[int, int, bytes]]:
        """(group, attempt, payload) of all that was issued so far."""
        starts = [message for message in self.generator if isinstance(message, m.Start)]
        return [
            (a.group, a.attempt, payload)
            for start in starts
            for a, payload in zip(start.groups, start.payloads, strict=True)
        ]

    def told(self, kind: type[m.Message]) -> list[Any]:
        return [message for message in self.launcher if isinstance(message, kind)]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Hub, Mail]:
    """A hub of two groups a step at a staleness of 1: four may be live."""
    tree: dict[str, Any] = {
        "data": {"path": "fed"},
        "reward": {"function": "fed"},
        "engine": {"urls": ["http://127.0.0.1:9"]},
        "rollout": {"num_steps": 3, "groups_per_step": 2, "samples_per_group": 1, "staleness": 1},
    }
    mail = Mail()
    hub = Hub(
        from_dict(tree),
        run="run",
        directory=tmp_path,
        table=RingTable(1 << 20),
        outbox=mail,
        log=EventLog(None),
        fed=FedStream(),
    )
    tell(hub, READY)
    return hub, mail


def tell(hub: Hub, *messages: m.Message) -> None:
    """Messages of the generator or the launcher, each followed by what the hub does about it."""
    for message in messages:
        if isinstance(message, m.Feed | m.Announce):
            assert hub.launcher is not None
            hub.launcher.receive(message)
        else:
            hub.generator.receive(message)
        hub.advance()


def settled(group: int, outcome: m.Settlement, attempt: int = 0) -> m.Settled:
    return m.Settled(group=group, attempt=attempt, outcome=outcome, reason="because", payload=b"samples")


def test_the_launcher_hears_how_many_prompts_can_be_used_and_groups_start_as_they_come(
    run: tuple[Hub, Mail],
) -> None:
    hub, mail = run
    assert [w.num_groups for w in mail.told(m.Wanted)] == [4]
    tell(hub, m.Feed(payloads=[b"a", b"b"]), m.Feed(payloads=[b"c", b"d", b"e"]))
    assert mail.started() == [(0, 0, b"a"), (1, 0, b"b"), (2, 0, b"c"), (3, 0, b"d")], "e is stock"


def test_a_rejection_takes_from_the_stock_at_once_and_wants_more(run: tuple[Hub, Mail]) -> None:
    hub, mail = run
    tell(hub, m.Feed(payloads=[b"a", b"b", b"c", b"d", b"e"]), settled(1, m.Settlement.FILTERED))
    assert mail.started()[-1] == (4, 0, b"e")
    assert mail.told(m.Wanted)[-1].num_groups == 5
    departed = mail.told(m.Departed)
    assert [(d.group, d.outcome, d.reason, d.payload) for d in departed] == [
        (1, m.Settlement.FILTERED, "because", b"samples")
    ]


def test_a_group_that_comes_back_starts_again_with_its_payload(run: tuple[Hub, Mail]) -> None:
    hub, mail = run
    tell(hub, m.Feed(payloads=[b"a", b"b"]), settled(0, m.Settlement.RETURNED))
    assert mail.started()[-1] == (0, 1, b"a")
    assert not mail.told(m.Departed)
    hub.generator.gone("by signal SIGKILL", will_restart=True)
    tell(hub, READY)
    assert sorted(mail.started()[-2:]) == [(0, 2, b"a"), (1, 1, b"b")]


def test_what_comes_with_a_record_is_passed_on_and_not_kept(run: tuple[Hub, Mail]) -> None:
    hub, mail = run
    tell(hub, m.Feed(payloads=[b"a"]), commit(hub, group=0, payload=b"the rest"))
    assert [(e.group, e.attempt, e.payload) for e in mail.told(m.Enclosed)] == [(0, 0, b"the rest")]
    assert hub.core.flow is not None
    kept = hub.core.flow.books.groups[0].commit
    assert kept is not None
    assert kept.payload == b""


def test_an_empty_stock_is_no_end_of_the_data(run: tuple[Hub, Mail]) -> None:
    hub, mail = run
    tell(hub, m.Feed(payloads=[b"a"]), settled(0, m.Settlement.FILTERED))
    assert hub.core.flow is not None
    assert not hub.core.flow.all_composed
    tell(hub, m.Feed(payloads=[b"b"]))
    assert mail.started()[-1] == (1, 0, b"b")


def test_an_announcement_publishes_and_reaches_every_generator(run: tuple[Hub, Mail]) -> None:
    hub, mail = run
    announce = m.Announce(step=7, version=2, held=2)
    tell(hub, announce)
    assert hub.core.flow is not None
    assert hub.core.flow.version == 2
    assert mail.generator[-1] == announce
    resume = hub.generator.resume_message()
    assert (resume.step, resume.version) == (7, 2)


def test_a_fed_group_whose_tokens_grew_too_old_goes_back_to_the_data(run: tuple[Hub, Mail]) -> None:
    hub, mail = run
    tell(
        hub,
        m.Feed(payloads=[b"a"]),
        commit(hub, group=0, payload=b"x"),
        m.Announce(step=5, version=9, held=9),
    )
    assert hub.core.flow is not None
    hub.core.flow.compose()
    hub.advance()
    assert mail.started()[-1] == (0, 1, b"a")
    assert not mail.told(m.Departed)


def commit(hub: Hub, *, group: int, payload: bytes) -> m.Commit:
    """A record at the ring's start, of version 0."""
    head, sequence = hub.core.table.restart()
    return m.Commit(
        incarnation=hub.core.table.incarnation,
        sequence=sequence,
        position=head,
        length=1024,
        lowest_open=head + 1024,
        group=group,
        attempt=0,
        oldest_version=0,
        newest_version=0,
        prompt_lens=[1],
        response_lens=[1],
        loss_lens=[1],
        spans=[[(0, 1, 1)]],
        rewards=[0.0],
        payload=payload,
    )
