"""Every control call fails in every way, at one engine or at two: the run goes on, and no label is untrue."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_rollout.client import Completion, EnginePool
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.versions import VersionBook, parse_label, resolve_spans
from fa_rollout.generator.updates.engine_updates import EngineUpdates
from tests.client.local_engines import LocalEngines, run_virtually
from tests.kit.scripted import Lengths, Rule, Script
from tests.kit.scripted.server import EngineServer
from trainer_hook import messages as m
from trainer_hook.record import UNKNOWN_VERSION

URLS = ["http://a:1", "http://b:1"]
LINEAGE = "11aa22bb"
NUM_VERSIONS = 3
WITHIN_S = 180.0
"""Virtual seconds for an update, whatever fails in it; an unanswered load takes up to `update_timeout_s`."""

WAYS: dict[str, dict[str, Any]] = {
    "refused": {"status": 500, "body": "busy"},
    "refused and done": {"status": 500, "body": "busy", "is_done": True},
    "unanswered": {"silent": True},
    "unanswered and done": {"silent": True, "is_done": True},
    "dropped": {"drop": "before"},
    "dropped and done": {"drop": "before", "is_done": True},
    "answered and not done": {"body": '{"success": true}'},
}
PATHS = [
    "/pause_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/continue_generation",
]

faults = st.builds(
    lambda path, way, skip, times: Rule(path=path, skip=skip, times=times, **WAYS[way]),
    st.sampled_from(PATHS),
    st.sampled_from(sorted(WAYS)),
    st.integers(0, 2),
    st.integers(1, 3),
)


class _Requests:
    """What `EngineUpdates` asks of the requester; engines that tell spans need nothing settled."""

    num_under_way = 0


def play(*rules: Rule) -> Script:
    return Script(tokens_per_s=20.0, lengths=Lengths(tokens=30), health_timeout_s=5.0, rules=list(rules))


def watch(server: EngineServer) -> list[str]:
    """Labels that the engine was given although it holds other weights."""
    untrue: list[str] = []
    set_label = server.core.set_label

    def checked(label: str) -> None:
        number = parse_label(label, LINEAGE)
        path = "scripted" if number == 0 else f"/weights/{number}"
        if number != UNKNOWN_VERSION and server.core.script.model_path != path:
            untrue.append(f"{label} for {server.core.script.model_path}")
        set_label(label)

    server.core.set_label = checked  # type: ignore[method-assign]
    return untrue


async def within(seconds: float, done: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not done():  # noqa: ASYNC110 - virtual seconds
                await asyncio.sleep(0.25)
    except TimeoutError:
        pytest.fail(f"{what} within {seconds:g} virtual seconds")


async def play_a_run(local: LocalEngines) -> None:
    """Callers that never stop, and updates among them."""
    policy = FailurePolicy(update_timeout_s=20.0, pause_timeout_s=40.0)
    untrue = [watch(server) for server in local.servers.values()]
    async with EnginePool(URLS, policy=policy, max_concurrent_samples=8) as pool:
        pool.weights.claim([LINEAGE])
        book = VersionBook(lineage=LINEAGE, published=0)
        await pool.weights.set_label(book.label(0))
        pool.weights.assume(None, book.label(0))
        said: list[m.Message] = []
        gate = Gate()
        requests: Any = _Requests()
        updates = EngineUpdates(
            pool, requester=requests, book=book, gates=(gate,), mode="retract", settle_s=1, send=said.append
        )
        answers: list[Completion] = []

        async def call_forever(name: int) -> None:
            serial = 0
            while True:
                serial += 1
                await gate.passed()
                floor = book.published
                sampling = {"max_new_tokens": 30}
                done = await pool.generate(
                    rid=f"c{name}-{serial}", input_ids=[1 + name, 2, 3], sampling_params=sampling
                )
                answers.append(done)
                spans = resolve_spans(
                    done.versions,
                    num_tokens=len(done.output_ids),
                    lineage=LINEAGE,
                    floor=floor,
                    ceiling=book.announced,
                    has_spans=True,
                )
                assert all(floor <= span.version <= book.announced for span in spans if span.version >= 0)
                if any(span.version == UNKNOWN_VERSION for span in spans):
                    pool.weights.recheck()

        async with asyncio.TaskGroup() as tasks:
            works = [tasks.create_task(call_forever(i)) for i in range(4)] + [
                tasks.create_task(updates.run())
            ]
            for version in range(1, NUM_VERSIONS + 1):
                updates.order(m.PublishWeights(version=version, lineage=LINEAGE, path=f"/weights/{version}"))
                await within(
                    WITHIN_S, partial(has_ended, said, version), f"version {version} must be published"
                )
            many = len(answers) + 8
            await within(60, lambda: len(answers) >= many, "answers must come after the last update")
            await within(120, lambda: all(map(is_current, local.servers.values())), "all engines must be in")
            for work in works:
                work.cancel()
    assert not any(isinstance(one, m.UpdateFailed) for one in said), said
    assert untrue == [[], []]
    assert all(server.core.pause_mode is None for server in local.servers.values())


def has_ended(said: list[m.Message], version: int) -> bool:
    return any(isinstance(one, m.WeightsPublished) and one.version == version for one in said)


def is_current(server: EngineServer) -> bool:
    return server.core.pause_mode is None and server.core.label == f"{LINEAGE}:{NUM_VERSIONS}"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(faults, max_size=2), st.lists(faults, max_size=1))
def test_whatever_control_call_fails_updates_end_and_no_label_is_untrue(
    of_first: list[Rule], of_second: list[Rule]
) -> None:
    async def go() -> None:
        local = LocalEngines({URLS[0]: play(*of_first), URLS[1]: play(*of_second)})
        with local.reached():
            await play_a_run(local)

    run_virtually(go)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", PATHS)
def test_a_control_call_that_fails_at_both_engines_is_repeated_until_it_is_done(path: str, way: str) -> None:
    async def go() -> None:
        rule = Rule(path=path, times=1, **WAYS[way])
        local = LocalEngines(dict.fromkeys(URLS, play(rule)))
        with local.reached():
            await play_a_run(local)

    run_virtually(go)
