"""Turns over real HTTP: what becomes of aborts, and which version made which token."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from fa_rollout.client import EnginePool, EngineUnavailable, FailurePolicy, RequestRefused
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.job import Job
from fa_rollout.generator.turns.requester import PartialPolicy, Requester, Ticket
from fa_rollout.generator.turns.turn import Draft, Turn
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.sample import FinishReason, VersionSpan
from tests.generator.conftest import NUM_TOKENS
from tests.generator.hub_end import LINEAGE, VOCAB_SIZE
from tests.kit.scripted import (
    EOS_ID,
    Lengths,
    Rule,
    ScriptedEngine,
    expected_ids,
    expected_logprobs,
    sequence_key,
)
from trainer_hook.messages import Assignment

PROMPT = np.arange(3, 23, dtype=np.int32)
KEY = sequence_key(PROMPT)
RESUME = PartialPolicy(resume=True, backoff_base_s=0.001, backoff_cap_s=0.01)
RESTART = PartialPolicy(resume=False, max_restarts=4)


def ours(**what: Any) -> Rule:
    """A rule that meets the test's requests, and not the pool's probes."""
    return Rule(prompt_start=PROMPT[:4].tolist(), **what)


Play = Callable[..., ScriptedEngine]


class Bench:
    """A requester on a real pool, and the hands to move versions and gate."""

    def __init__(self, pool: EnginePool, policy: PartialPolicy, seed: int | None) -> None:
        self.pool = pool
        self.book = VersionBook(lineage=LINEAGE, published=0)
        self.gate = Gate()
        self.first_requests: list[int] = []
        self.further: dict[str, Any] = {}
        """Further sampling parameters."""
        self.requester = Requester(
            pool,
            book=self.book,
            gate=self.gate,
            policy=policy,
            seed=seed,
            on_first_request=lambda job: self.first_requests.append(job.assignment.group),
            ends=Ends([EOS_ID], lambda ids: "x" * len(ids)),
        )

    async def turn(self, max_new_tokens: int = 32, group: int = 0, member: int = 0) -> Turn:
        job = Job(assignment=Assignment(group=group, attempt=0, epoch=0, prompt_index=0))
        params = {"max_new_tokens": max_new_tokens, "temperature": 1.0} | self.further
        return await self.requester.sample_turn(Ticket(job=job, member=member), PROMPT, params)

    async def publish(self, version: int) -> None:
        self.book.announce(LINEAGE, version)
        await self.pool.weights.set_label(f"{LINEAGE}:{version}")
        self.book.confirm(version)

    async def under_way(self, count: int) -> None:
        while self.requester.num_under_way != count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def bench_on(
    engine: ScriptedEngine, policy: PartialPolicy, seed: int | None = None, **limits: float
) -> AsyncIterator[Bench]:
    failures = FailurePolicy(**limits)
    async with asyncio.timeout(20), EnginePool([engine.url], policy=failures, vocab_size=VOCAB_SIZE) as pool:
        bench = Bench(pool, policy, seed)
        await bench.publish(0)
        engine.clear()
        yield bench


def run(
    engine: ScriptedEngine,
    policy: PartialPolicy,
    scenario: Callable[[Bench], Coroutine[Any, Any, Any]],
    **limits: float,
) -> Any:
    async def go() -> Any:
        async with bench_on(engine, policy, **limits) as bench:
            return await scenario(bench)

    return asyncio.run(go())


def assert_is_the_engines(turn: Turn, labels: list[tuple[int, int]]) -> None:
    """Ids and log-probabilities are what the engine made, each under the version of its span."""
    start, stop = len(PROMPT), len(PROMPT) + len(turn.output_ids)
    ids = expected_ids(KEY, start, stop, VOCAB_SIZE)
    if turn.finish_reason is FinishReason.STOP:
        ids = np.append(ids[:-1], EOS_ID)
    assert turn.output_ids.tolist() == ids.tolist()
    assert [(span.version, span.end) for span in turn.version_spans] == labels
    begin = 0
    for version, end in labels:
        expected = expected_logprobs(KEY, start + begin, start + end, f"{LINEAGE}:{version}")
        np.testing.assert_array_equal(turn.logprobs[begin:end], expected)
        begin = end


async def _sample_over_three_versions(bench: Bench) -> Turn:
    """The engine aborts after 2 tokens at version 2, after 2 more at version 4, and finishes at 6."""
    bench.gate.hold("test")
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(bench.turn())
        for version in (2, 4, 6):
            await bench.publish(version)
            bench.gate.release("test")
            await bench.under_way(1)
            bench.gate.hold("test")
            await bench.requester.settled()
    return turn.result()


ABORTED_TWICE = [ours(abort_after=2, times=2, delay_s=0.1), ours(delay_s=0.1)]


def test_resumed_answers_keep_every_segment_with_its_version_and_reduce_the_budget(play: Play) -> None:
    engine = play(rules=ABORTED_TWICE)
    turn = run(engine, RESUME, _sample_over_three_versions)
    assert turn.finish_reason is FinishReason.STOP
    # The engine's own answer has 12 tokens from whatever prompt it gets.
    assert_is_the_engines(turn, [(2, 2), (4, 4), (6, 4 + NUM_TOKENS)])
    requests = engine.requests("/generate")
    assert [r.num_input_ids for r in requests] == [20, 22, 24]
    assert [r.body["sampling_params"]["max_new_tokens"] for r in requests] == [32, 30, 28]


def test_restarted_answers_hold_the_last_versions_tokens_alone(play: Play) -> None:
    engine = play(rules=ABORTED_TWICE)
    turn = run(engine, RESTART, _sample_over_three_versions)
    assert_is_the_engines(turn, [(6, NUM_TOKENS)])
    requests = engine.requests("/generate")
    assert [r.num_input_ids for r in requests] == [20, 20, 20]
    assert [r.body["sampling_params"]["max_new_tokens"] for r in requests] == [32, 32, 32]


@pytest.mark.parametrize("stop", ["xyz", ["xyz", ""]])
def test_over_a_seam_one_stop_text_is_not_its_letters_and_an_empty_one_is_none(play: Play, stop: Any) -> None:
    async def scenario(bench: Bench) -> Turn:
        bench.further = {"stop": stop}
        return await bench.turn()

    turn = run(play(rules=[ours(abort_after=2, times=1)]), RESUME, scenario)
    assert_is_the_engines(turn, [(0, 2 + NUM_TOKENS)])


def test_an_answer_under_a_grammar_is_restarted_since_an_engine_would_begin_it_anew(play: Play) -> None:
    async def scenario(bench: Bench) -> Turn:
        bench.further = {"regex": "[a-z]+"}
        return await bench.turn()

    engine = play(rules=[ours(abort_after=2, times=1)])
    assert_is_the_engines(run(engine, RESUME, scenario), [(0, NUM_TOKENS)])
    assert [r.num_input_ids for r in engine.requests("/generate")] == [20, 20]


@pytest.mark.parametrize(
    ("last_id", "further"),
    [
        (EOS_ID, {}),
        (EOS_ID, {"regex": "[a-z]+"}),
        (7, {"stop_token_ids": [7]}),
        (None, {"stop": ["xxxx"]}),
        (None, {"stop_regex": "x{4}"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [RESUME, RESTART], ids=["resume", "restart"])
def test_an_answer_that_an_engine_aborts_at_its_end_is_whole(
    play: Play, policy: PartialPolicy, last_id: int | None, further: dict[str, Any]
) -> None:
    async def scenario(bench: Bench) -> Turn:
        bench.further = further
        return await bench.turn()

    engine = play(rules=[ours(abort_after=4, last_id=last_id, times=1)])
    turn = run(engine, policy, scenario)
    assert len(turn.output_ids) == len(turn.logprobs) == 4
    assert turn.finish_reason is FinishReason.STOP
    assert len(engine.requests("/generate")) == 1


def test_what_was_sampled_behind_an_end_is_thrown_away(play: Play) -> None:
    ids = expected_ids(KEY, len(PROMPT), len(PROMPT) + 8, VOCAB_SIZE)

    async def scenario(bench: Bench) -> Turn:
        bench.further = {"stop_token_ids": [int(ids[5])]}
        turn = await bench.turn()
        assert bench.requester.counts.discarded_tokens == 2
        return turn

    turn = run(play(rules=[ours(abort_after=8, times=1)]), RESUME, scenario)
    assert turn.output_ids.tolist() == ids[:6].tolist()
    assert [(span.version, span.end) for span in turn.version_spans] == [(0, 6)]


def test_tokens_that_a_checkpoint_kept_of_a_whole_answer_need_no_request(play: Play) -> None:
    engine = play()

    async def scenario(bench: Bench) -> Turn:
        job = Job(assignment=Assignment(group=0, attempt=0, epoch=0, prompt_index=0))
        draft = Draft(
            ids=[np.array([5, 6, EOS_ID], np.int32)],
            logprobs=[np.zeros(3, np.float32)],
            spans=[VersionSpan(0, 3)],
            num_tokens=3,
        )
        params = {"max_new_tokens": 32}
        return await bench.requester.sample_turn(Ticket(job=job, member=0), PROMPT, params, draft=draft)

    assert run(engine, RESUME, scenario).finish_reason is FinishReason.STOP
    assert engine.requests("/generate") == []


@pytest.mark.parametrize("penalty", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}], ids=str)
def test_an_answer_under_a_penalty_is_restarted_since_an_engine_would_not_count_its_tokens(
    play: Play, penalty: dict[str, Any]
) -> None:
    async def scenario(bench: Bench) -> Turn:
        bench.further = penalty
        return await bench.turn()

    engine = play(rules=[ours(abort_after=2, times=1)])
    assert_is_the_engines(run(engine, RESUME, scenario), [(0, NUM_TOKENS)])
    assert [r.num_input_ids for r in engine.requests("/generate")] == [20, 20]


def test_a_request_for_several_answers_is_refused_unsent(play: Play) -> None:
    async def scenario(bench: Bench) -> Turn:
        bench.further = {"n": 2}
        return await bench.turn()

    engine = play()
    with pytest.raises(SampleFailed, match="found n = 2"):
        run(engine, RESUME, scenario)
    assert engine.requests("/generate") == []


def test_a_budget_that_is_used_up_ends_the_answer_by_length_without_a_request(play: Play) -> None:
    engine = play(rules=[ours(abort_after=2, times=2)])
    turn = run(engine, RESUME, lambda bench: bench.turn(max_new_tokens=4))
    assert turn.finish_reason is FinishReason.LENGTH
    assert len(turn.output_ids) == 4
    assert len(engine.requests("/generate")) == 2


def test_no_room_at_all_is_an_empty_answer_without_a_request(play: Play) -> None:
    engine = play()
    turn = run(engine, RESUME, lambda bench: bench.turn(max_new_tokens=-17))
    assert turn.finish_reason is FinishReason.LENGTH
    assert len(turn.output_ids) == len(turn.logprobs) == len(turn.version_spans) == 0
    assert engine.requests("/generate") == []


@pytest.mark.parametrize("policy", [RESUME, RESTART], ids=["resume", "restart"])
def test_aborts_without_a_token_are_normal(play: Play, policy: PartialPolicy) -> None:
    engine = play(rules=[ours(abort_after=0, times=3)])
    turn = run(engine, policy, lambda bench: bench.turn())
    assert_is_the_engines(turn, [(0, NUM_TOKENS)])
    assert len(engine.requests("/generate")) == 4


def test_aborts_without_a_token_are_borne_for_as_long_as_a_dead_engine(play: Play) -> None:
    engine = play(rules=[ours(abort_after=0)])
    with pytest.raises(EngineUnavailable, match=r"no progress: aborted \d+ times in a row without a token"):
        run(engine, RESUME, lambda bench: bench.turn(), unavailable_timeout_s=0.3)
    assert len(engine.requests("/generate")) > 12


def test_an_answer_with_progress_between_its_empty_aborts_is_never_given_up(play: Play) -> None:
    empty = ours(abort_after=0, every=2)
    engine = play(rules=[empty, ours(abort_after=1)])
    turn = run(engine, RESUME, lambda bench: bench.turn(max_new_tokens=9))
    assert len(turn.output_ids) == 9
    assert len(engine.requests("/generate")) == 18


def test_an_answer_that_is_restarted_again_and_again_is_given_up_and_the_error_says_why(play: Play) -> None:
    engine = play(rules=[ours(abort_after=5)])
    with pytest.raises(SampleFailed, match=r"no progress: started 4 times .*rollout\.partial"):
        run(engine, RESTART, lambda bench: bench.turn())
    assert len(engine.requests("/generate")) == 4


@pytest.mark.parametrize("policy", [RESUME, RESTART], ids=["resume", "restart"])
def test_aborts_of_everything_that_nobody_here_asked_for_lose_nothing(
    play: Play, policy: PartialPolicy
) -> None:
    # An answer takes two seconds: none may end while the others are still on their way to the engine.
    engine = play(tokens_per_s=20.0, lengths=Lengths(tokens=40))

    async def scenario(bench: Bench) -> list[Turn]:
        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(bench.turn(max_new_tokens=40, group=group)) for group in range(64)]
            for _ in range(3):
                await bench.under_way(64)
                await asyncio.sleep(0.05)
                await asyncio.to_thread(_abort_everything, engine)
        return [turn.result() for turn in turns]

    for turn in run(engine, policy, scenario):
        assert_is_the_engines(turn, [(0, 40)])


def _abort_everything(engine: ScriptedEngine) -> None:
    body = json.dumps({"abort_all": True}).encode()
    request = urllib.request.Request(
        f"{engine.url}/abort_request", body, {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(request, timeout=5).close()


def test_request_ids_are_of_one_length_and_never_used_twice(play: Play) -> None:
    engine = play(rules=[ours(abort_after=1, times=30)])

    async def scenario(bench: Bench) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group in range(12):
                tasks.create_task(bench.turn(group=10**group, member=group))

    run(engine, RESUME, scenario)
    rids = [r.rid for r in engine.requests("/generate")]
    assert len(rids) == 42
    assert len(set(rids)) == len(rids)
    assert len({len(rid or "") for rid in rids}) == 1


def test_a_refused_request_is_sent_once(play: Play) -> None:
    engine = play(rules=[ours(status=400, body='{"error":{"message":"no"}}')])
    with pytest.raises(RequestRefused):
        run(engine, RESUME, lambda bench: bench.turn())
    assert len(engine.requests("/generate")) == 1


def test_the_first_request_of_a_group_is_told_once(play: Play) -> None:
    engine = play(rules=[ours(abort_after=1, times=3)])

    async def scenario(bench: Bench) -> list[int]:
        await bench.turn(group=7)
        return bench.first_requests

    assert run(engine, RESUME, scenario) == [7]


def test_nothing_leaves_through_a_closed_gate(play: Play) -> None:
    engine = play()

    async def scenario(bench: Bench) -> Turn:
        bench.gate.hold("update")
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.turn())
            await asyncio.sleep(0.1)
            assert engine.requests("/generate") == []
            bench.gate.release("update")
        return turn.result()

    assert_is_the_engines(run(engine, RESUME, scenario), [(0, NUM_TOKENS)])


def test_a_version_that_an_engine_fell_back_to_is_unknown(play: Play) -> None:
    engine = play()

    async def scenario(bench: Bench) -> Turn:
        await bench.publish(7)
        await bench.pool.weights.set_label("default")
        return await bench.turn()

    turn = run(engine, RESUME, scenario)
    assert [(span.version, span.end) for span in turn.version_spans] == [(-1, NUM_TOKENS)]


def test_a_reply_without_a_version_is_of_an_unknown_one(play: Play) -> None:
    engine = play(rules=[ours(corrupt="no_version")])
    turn = run(engine, RESUME, lambda bench: bench.turn())
    assert [(span.version, span.end) for span in turn.version_spans] == [(-1, NUM_TOKENS)]


def test_each_request_has_a_seed_of_its_own_that_another_run_has_too(play: Play) -> None:
    async def seeds(engine: ScriptedEngine) -> list[int]:
        async with bench_on(engine, RESUME, seed=3) as bench:
            for member in range(2):
                await bench.turn(member=member)
        return [r.body["sampling_params"]["sampling_seed"] for r in engine.requests("/generate")]

    rules = [ours(abort_after=1, times=1)]
    first = asyncio.run(seeds(play(rules=rules)))
    assert len(set(first)) == 3
    assert asyncio.run(seeds(play(rules=rules))) == first


def test_aborts_of_our_own_are_no_stalls_however_many() -> None:
    rules = [Rule(rid=".0-m0", silent=True, times=6)]

    async def scenario(bench: Bench) -> Turn:
        turn = asyncio.create_task(bench.turn())
        for _ in range(6):
            await bench.under_way(1)
            await bench.requester.abort_all()
            await bench.requester.settled()
        return await turn

    with ScriptedEngine.start(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=40), rules=rules) as engine:
        limits = {"abort_grace_s": 0.1, "unavailable_timeout_s": 0.2}
        assert len(run(engine, PartialPolicy(resume=True), scenario, **limits).output_ids) == 32
