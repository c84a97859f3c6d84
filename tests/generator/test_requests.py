"""What requests look like and where they end: context, stop texts, caches, routing, single samples."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa_rollout.client.pool import EnginePool
from fa_rollout.client.wire.completion import Completion
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.job import Job
from fa_rollout.generator.turns.requester import PartialPolicy, Requester, Ticket
from fa_rollout.generator.turns.turn import Draft, Turn
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.sample import FinishReason
from tests.generator.hub_end import LINEAGE, VOCAB_SIZE, HubEnd, run_tree
from tests.hub.rig import Rig
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine, expected_ids, sequence_key
from trainer_hook import messages as m
from trainer_hook.record import VersionSpan

Play = Callable[..., ScriptedEngine]

CODE = "tests.generator.user_code"
PROMPT = np.arange(3, 23, dtype=np.int32)
KEY = sequence_key(PROMPT)


def letters(ids: np.ndarray) -> str:
    """A text for token ids: one letter each."""
    return "".join(chr(ord("A") + token) for token in ids.tolist())


def test_a_draft_that_is_cut_keeps_its_fields_together() -> None:
    draft = Draft()
    draft.ids = [np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)]
    draft.logprobs = [np.zeros(4, np.float32), np.ones(4, np.float32)]
    draft.spans = [VersionSpan(1, 4), VersionSpan(2, 8)]
    draft.num_tokens = 8
    for end, spans in ((6, [(1, 4), (2, 6)]), (4, [(1, 4)]), (2, [(1, 2)])):
        draft.cut(end)
        turn = draft.finish(PROMPT, FinishReason.STOP)
        assert len(turn.output_ids) == len(turn.logprobs) == end
        assert [(span.version, span.end) for span in turn.version_spans] == spans


def test_rows_of_what_engines_told_beside_the_tokens_end_with_the_turn() -> None:
    draft = Draft()
    experts = np.arange(len(PROMPT) + 7).reshape(-1, 1)
    draft.add(
        Completion(
            output_ids=np.arange(8, dtype=np.int32),
            logprobs=np.zeros(8, np.float32),
            finish="abort",
            versions=(),
            has_spans=True,
            extra={"routed_experts": experts},
        ),
        [VersionSpan(1, 8)],
    )
    draft.cut(3)
    extras = draft.finish(PROMPT, FinishReason.STOP).extras
    assert extras["routed_experts"].tolist() == experts[: len(PROMPT) + 2].tolist()


def sample(engine: ScriptedEngine, params: dict[str, Any], **settings: Any) -> Turn:
    async def go() -> Turn:
        async with asyncio.timeout(20), EnginePool([engine.url], vocab_size=VOCAB_SIZE) as pool:
            book = VersionBook(lineage=LINEAGE, published=0)
            await pool.weights.set_label(book.label(0))
            engine.clear()
            requester = Requester(
                pool,
                book=book,
                gate=Gate(),
                policy=PartialPolicy(resume=True, backoff_base_s=0.001),
                seed=None,
                on_first_request=lambda job: None,
                context_length=pool.context_length,
                ends=Ends(decode=letters),
                **settings,
            )
            job = Job(assignment=m.Assignment(group=0, attempt=0, epoch=0, prompt_index=0))
            return await requester.sample_turn(Ticket(job=job, member=0), PROMPT, params)

    return asyncio.run(go())


def test_an_answer_that_is_resumed_inside_of_a_stop_text_ends_with_it(play: Play) -> None:
    ids = expected_ids(KEY, len(PROMPT), len(PROMPT) + 30, VOCAB_SIZE)
    stop = letters(ids[8:12])
    rules = [Rule(prompt_start=PROMPT[:4].tolist(), abort_after=10, times=1)]
    engine = play(lengths=Lengths(tokens=30), rules=rules)
    turn = sample(engine, {"max_new_tokens": 64, "stop": [stop]})
    assert turn.output_ids.tolist() == ids[:12].tolist()
    assert turn.finish_reason is FinishReason.STOP
    assert [(span.version, span.end) for span in turn.version_spans] == [(0, 12)]


# --- context and caches --------------------------------------------------------------------------------


def test_a_budget_is_cut_to_what_the_engines_context_has_room_for(play: Play) -> None:
    engine = play(context_length=40, lengths=Lengths(tokens=100))
    turn = sample(engine, {"max_new_tokens": 64})
    assert len(turn.output_ids) == 40 - len(PROMPT) - 1
    assert turn.finish_reason is FinishReason.LENGTH
    (request,) = engine.requests("/generate")
    assert request.body["sampling_params"]["max_new_tokens"] == 19


def test_a_full_context_is_an_answer_cut_off_by_length_without_a_request(play: Play) -> None:
    engine = play(context_length=20)
    turn = sample(engine, {"max_new_tokens": 64})
    assert (len(turn.output_ids), turn.finish_reason) == (0, FinishReason.LENGTH)
    assert engine.requests("/generate") == []


def test_a_prompt_longer_than_the_engines_context_is_never_sent(tmp_path: Path, play: Play) -> None:
    engine = play(context_length=20)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.clear()
        hub.issue(0)
        (settled,) = hub.wait_for(m.Settled)
        assert settled.reason == "over-long: a prompt may have 18 tokens, found 28"
        assert engine.requests("/generate") == []


@pytest.mark.parametrize("keys_cache", [True, False])
def test_prefix_caches_are_keyed_by_the_version_where_that_is_asked_for(play: Play, keys_cache: bool) -> None:
    engine = play()
    sample(engine, {"max_new_tokens": 4}, keys_cache=keys_cache)
    (request,) = engine.requests("/generate")
    assert request.body["extra_key"] == (f"{LINEAGE}:0" if keys_cache else None)


# --- engines, groups, samples ----------------------------------------------------------------------------


@pytest.mark.parametrize(("balance", "num_keys"), [("group", 6), ("sample", 12)])
def test_requests_of_one_group_or_sample_share_an_engine(
    tmp_path: Path, play: Play, balance: str, num_keys: int
) -> None:
    first = play()
    script = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=12))
    with ScriptedEngine.start(script) as second:
        tree = run_tree(
            tmp_path,
            first.url,
            engine={"urls": [first.url, second.url], "balance": balance},
            rollout={"generate": "tests.generator.user_code.three_turns"},
        )
        with HubEnd(tree) as hub:
            hub.issue(*range(6))
            hub.answers(6)
        homes: dict[str, set[int]] = {}
        for number, engine in enumerate((first, second)):
            for request in engine.requests("/generate"):
                if request.routing_key is not None:
                    homes.setdefault(request.routing_key, set()).add(number)
        assert len(homes) == num_keys
        assert all(len(engines) == 1 for engines in homes.values())
        assert set(itertools.chain(*homes.values())) == {0, 1}


def test_one_sample_of_a_group_can_be_aborted_alone(tmp_path: Path, play: Play) -> None:
    engine = play(tokens_per_s=30.0, lengths=Lengths(tokens=30))
    rollout = {"num_steps": 1, "groups_per_step": 2, "samples_per_group": 3}
    with Rig(tmp_path / "run", engine, rollout=rollout) as rig, rig.attach() as hook:
        rig.until(lambda: len([r for r in engine.requests("/generate") if r.rid and "-g" in r.rid]) == 6)
        assert hook.abort(group=1, member=2) == 1
        with hook.next_batch() as batch:
            assert len(batch.samples) == 6
        sent = [r.rid.split("-")[2:4] for r in engine.requests("/generate") if r.rid and "-g" in r.rid]
        again = [key for key in map(tuple, sent) if sent.count(list(key)) > 1]
        assert set(again) == {("g1.0", "m2")}


def test_excluded_members_are_not_scored_and_a_group_of_them_is_filtered(tmp_path: Path, play: Play) -> None:
    tree = run_tree(
        tmp_path,
        play().url,
        rollout={"generate": f"{CODE}.excludes_members", "samples_per_group": 4},
        reward={"function": f"{CODE}.never_sees_the_excluded", "group": True},
    )
    with HubEnd(tree) as hub:
        hub.issue(0, 1)
        (commit,) = hub.wait_for(m.Commit)
        (settled,) = hub.wait_for(m.Settled)
        head = hub.read(commit).head
    assert commit.rewards == [0.0, None, 2.0, 3.0]
    assert (head.excluded, head.reward_mean, head.reward_count) == ([1], pytest.approx(5 / 3), 3)
    assert (settled.group, settled.outcome) == (1, m.Settlement.FILTERED)
    assert settled.reason == "no member is trained: every loss mask is 0"


def test_a_turn_can_ask_for_more_without_changing_the_others(tmp_path: Path, play: Play) -> None:
    engine = play()
    tree = run_tree(tmp_path, engine.url, rollout={"generate": "tests.generator.user_code.with_options"})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.clear()
        hub.issue(0)
        hub.wait_for(m.Commit)
    keys = [request.body["extra_key"] for request in engine.requests("/generate")]
    assert sorted(keys, key=str) == [None, None, "mine", "mine"]
