"""Wishes for engines: each answered once, given to the next generator when one does not live to answer."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.hub.state.membership import EngineMembership
from fa_rollout.launcher.running import ActiveRun, observe
from tests.hub.rig import VOCAB_SIZE, Rig
from tests.kit.scripted import ScriptedEngine
from trainer_hook.messages import (
    ChangeEngines,
    EnginesChanged,
    EnginesNow,
    Message,
    QuerySnapshot,
    Refused,
    SnapshotTaken,
)


class Scene:
    """A membership with its orders, answers and warnings."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.answers: list[Message] = []
        self.warnings: list[str] = []
        self.membership = EngineMembership(
            note=lambda event: None, warn=self.warnings.append, to_generator=self.orders.append
        )

    def request(self, url: str, *, joins: bool = True, request: int = 7) -> None:
        message = ChangeEngines(request=request, url=url, joins=joins, drain_s=3.0)
        self.membership.request(message, self.answers.append)

    def answer(self, order: ChangeEngines, engines: list[str], error: str | None = None) -> None:
        self.membership.changed(
            EnginesChanged(request=order.request, url=order.url, error=error, engines=engines, concurrency=8)
        )


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.membership.generator_is_up(b"")
    return scene


def test_a_request_is_forwarded_and_its_answer_returns_to_the_requester(scene: Scene) -> None:
    scene.request("b")
    (order,) = scene.orders
    assert (order.url, order.joins, order.drain_s) == ("b", True, 3.0)
    scene.answer(order, ["a", "b"])
    (answer,) = scene.answers
    assert isinstance(answer, EnginesNow)
    assert answer.request == 7
    assert answer.engines == ["a", "b"] == scene.membership.urls


def test_what_cannot_be_done_is_refused_and_warned_of(scene: Scene) -> None:
    scene.request("b")
    scene.answer(scene.orders[0], ["a"], error="it does not come up")
    (answer,) = scene.answers
    assert isinstance(answer, Refused)
    assert answer.request == 7
    assert "it does not come up" in scene.warnings[0]


def test_the_next_generator_gets_what_the_last_one_left_open(scene: Scene) -> None:
    scene.request("b")
    scene.request("c")
    scene.answer(scene.orders[0], ["a", "b"])
    scene.membership.generator_is_gone()
    scene.request("d")
    assert len(scene.orders) == 2
    scene.membership.generator_is_up(b"")
    assert [order.url for order in scene.orders] == ["b", "c", "c", "d"]


def test_an_answer_that_comes_twice_counts_once(scene: Scene) -> None:
    scene.request("b")
    for _ in range(2):
        scene.answer(scene.orders[0], ["a", "b"])
    assert len(scene.answers) == 1


def test_what_a_life_found_out_is_kept_for_the_next(scene: Scene) -> None:
    scene.membership.generator_is_gone()
    scene.membership.generator_is_up(b"a")
    assert scene.membership.known == b"a"


def test_who_hears_that_an_engine_has_come_or_gone_finds_it_so(
    rig: Callable[..., Rig], engine: ScriptedEngine
) -> None:
    with ScriptedEngine.start(vocab_size=VOCAB_SIZE) as other, rig() as run:
        here = ActiveRun(address=run.address, run=run.run_id, token=run.token, folder="", began_s=0.0)
        with closing(observe(here)) as connection:

            def ask(message: Message) -> Message:
                return connection.ask(message, timeout_s=20, waits_for="the hub")

            def found() -> list[str]:
                taken = ask(QuerySnapshot(request=connection.next_number()))
                assert isinstance(taken, SnapshotTaken)
                return [one.url for one in msgspec.msgpack.decode(taken.snapshot, type=Snapshot).engines]

            run.until(found)
            for joins in (True, False) * 3:
                number = connection.next_number()
                ask(ChangeEngines(request=number, url=other.url, joins=joins, drain_s=5.0))
                assert found() == [engine.url, *([other.url] if joins else [])]
