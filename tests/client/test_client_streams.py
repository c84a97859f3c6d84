"""Streams of weights: brackets of both ages, engines lost in the middle, and those that come back."""

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from client_kit import ask, quick, run_with, sent, until

from fa_rollout.client import EnginePool
from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.engine.labels import IN_PIECES
from fa_rollout.client.engine.tensor_body import SLICE_BYTES, TensorFile
from fa_rollout.client.fleet.weight_stream import EnginesLost
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from trainer_hook.messages import JoinGroup, TakeBroadcast

TENSORS = "/update_weights_from_tensor"
BROADCAST = "/update_weights_from_distributed"
LABELS = "/update_weight_version"
BUCKET = __file__
"""A file, whatever it holds: engines here take any."""


@pytest.fixture(scope="module")
def both() -> Iterator[list[ScriptedEngine]]:
    with (
        ScriptedEngine.start(lengths=Lengths(tokens=8)) as first,
        ScriptedEngine.start(lengths=Lengths(tokens=8)) as second,
    ):
        yield [first, second]


@pytest.fixture
def engines(both: list[ScriptedEngine]) -> list[ScriptedEngine]:
    for engine in both:
        engine.configure(rules=[])
        engine.clear()
    return both


async def stream(pool: EnginePool, label: str, *, num_buckets: int = 2) -> None:
    await pool.pause("retract", may_be_none=True)
    await pool.streams.open("retract")
    for _ in range(num_buckets):
        await pool.streams.take_tensors(BUCKET)
    await pool.streams.seal(label)
    await pool.streams.confirm(label)
    await pool.continue_()


async def plain_post(url: str, body: dict[str, str]) -> None:
    async with aiohttp.ClientSession(trust_env=False) as session, session.post(url, json=body) as response:
        assert response.status == 200


def posts(engine: ScriptedEngine) -> list[str]:
    return [r.path.strip("/") for r in engine.requests() if r.method == "POST" and r.path != "/generate"]


@pytest.mark.parametrize("protocol", ["0.5.15", "0.5.23"])
def test_both_ages_take_a_stream_and_tell_no_version_in_the_middle_of_it(protocol: str) -> None:
    with ScriptedEngine.start(protocol=protocol, lengths=Lengths(tokens=8)) as engine:
        run_with(engine, lambda pool: stream(pool, "0:1"))
        brackets = protocol == "0.5.23"
        assert posts(engine) == [
            "pause_generation",
            "pause_generation",
            "flush_cache",
            "update_weight_version",
            "begin_weight_update",
            *["update_weights_from_tensor"] * 2,
            *["end_weight_update"] * brackets,
            "update_weight_version",
            "continue_generation",
        ]
        labels = sent(engine, LABELS)
        assert [r.body["new_version"] for r in labels] == [IN_PIECES, "0:1"]
        assert not any(r.body["abort_all_requests"] for r in labels)
        assert all(r.body["flush_cache"] is False for r in sent(engine, TENSORS))


def test_a_session_that_a_dead_trainer_left_open_is_closed_first() -> None:
    with ScriptedEngine.start(protocol="0.5.23", lengths=Lengths(tokens=8)) as engine:

        async def work(pool: EnginePool) -> None:
            await pool.pause("retract")
            await pool.streams.open("retract")
            pool._fleet.engines[0].standing.in_session = False  # as if another life had begun it
            await pool.streams.open("retract")
            await pool.streams.take_tensors(BUCKET)

        run_with(engine, work)
        sessions = [path for path in posts(engine) if path.endswith("_weight_update")]
        assert sessions == ["begin_weight_update"] * 2 + ["end_weight_update", "begin_weight_update"]


def test_an_engine_that_misses_a_part_gets_no_request_until_the_next_stream(
    engines: list[ScriptedEngine],
) -> None:
    lost, other = engines

    async def work(pool: EnginePool) -> None:
        lost.configure(rules=[Rule(path=TENSORS, drop="before", times=1)])
        await stream(pool, "0:1")
        assert await pool.weights.versions() == {other.url: "0:1"}
        await until(lambda: len(sent(lost, "/health")) > 1)  # it was looked at, and is well
        for engine in engines:
            engine.clear()
        await asyncio.gather(*(ask(pool, f"r{i}") for i in range(8)))
        assert (len(sent(lost)), len(sent(other))) == (0, 8)
        await stream(pool, "0:2")
        assert await pool.weights.versions() == {lost.url: "0:2", other.url: "0:2"}
        await asyncio.gather(*(ask(pool, f"r{i}") for i in range(8)))
        assert sent(lost)

    run_with([engine.url for engine in engines], work)


def test_what_all_engines_lose_can_be_begun_anew_and_is_then_whole(engines: list[ScriptedEngine]) -> None:
    async def work(pool: EnginePool) -> None:
        for engine in engines:
            engine.configure(rules=[Rule(path=TENSORS, drop="before", times=1)])
        await pool.pause("retract")
        await pool.streams.open("retract")
        with pytest.raises(EnginesLost):
            await pool.streams.take_tensors(BUCKET)
        await stream(pool, "0:3")
        assert set((await pool.weights.versions()).values()) == {"0:3"}
        assert (await ask(pool)).versions == (("0:3", 8),)

    run_with([engine.url for engine in engines], work)


def test_engines_of_an_abandoned_stream_wait_for_the_next_one(engines: list[ScriptedEngine]) -> None:
    async def work(pool: EnginePool) -> None:
        await stream(pool, "0:1")
        await pool.pause("retract")
        await pool.streams.open("retract")
        await pool.streams.abandon("0:1")
        await pool.continue_()
        for engine in engines:
            engine.clear()
        waiting = asyncio.create_task(ask(pool))
        await until(lambda: all(len(sent(engine, "/health")) > 1 for engine in engines))
        assert not waiting.done()
        assert not any(sent(engine) for engine in engines)
        await stream(pool, "0:2")
        assert (await waiting).versions == (("0:2", 8),)

    run_with([engine.url for engine in engines], work, policy=quick(unavailable_timeout_s=30.0))


def test_without_another_stream_the_error_says_what_is_missing(engines: list[ScriptedEngine]) -> None:
    async def work(pool: EnginePool) -> None:
        await pool.pause("retract")
        await pool.streams.open("retract")
        await pool.streams.abandon("0:1")
        await pool.continue_()
        with pytest.raises(Exception, match="replaced in part"):
            await ask(pool)

    run_with([engine.url for engine in engines], work, policy=quick(unavailable_timeout_s=0.5))


def test_a_refusal_is_told_as_it_is(engines: list[ScriptedEngine]) -> None:
    refusal = Rule(path=TENSORS, status=400, body='{"success":false,"message":"shapes differ"}')

    async def work(pool: EnginePool) -> None:
        engines[0].configure(rules=[refusal])
        await pool.pause("retract")
        await pool.streams.open("retract")
        with pytest.raises(ControlRefused, match="shapes differ"):
            await pool.streams.take_tensors(BUCKET)
        await pool.streams.abandon("default")

    run_with([engine.url for engine in engines], work)


def test_one_engine_that_is_lost_spoils_a_broadcast_for_all_and_the_group_is_made_anew(
    engines: list[ScriptedEngine],
) -> None:
    lost, _ = engines
    group = JoinGroup(group="g", former=None, address="127.0.0.1", port=1, backend="gloo")
    broadcast = TakeBroadcast(group="g", names=["a"], dtypes=["float32"], shapes=[[1]])

    async def work(pool: EnginePool) -> None:
        await pool.pause("retract")
        assert (await pool.streams.open("retract")).num_workers == 2
        await pool.streams.join_group(group)
        assert (await pool.streams.open("retract")).group == "g"
        lost.configure(rules=[Rule(path=BROADCAST, drop="before", times=1)])
        with pytest.raises(EnginesLost):
            await pool.streams.take_broadcast(broadcast)
        audience = await pool.streams.open("retract")
        assert (audience.group, audience.num_workers) == (None, 2)
        await pool.streams.abandon("default")

    run_with([engine.url for engine in engines], work)
    offsets = [sent(engine, "/init_weights_update_group")[0].body["rank_offset"] for engine in engines]
    assert offsets == [1, 2]


def test_an_engine_that_was_started_anew_is_in_no_group(engines: list[ScriptedEngine]) -> None:
    group = JoinGroup(group="g", former=None, address="127.0.0.1", port=1, backend="gloo")

    async def work(pool: EnginePool) -> None:
        await pool.pause("retract")
        await pool.streams.open("retract")
        await pool.streams.join_group(group)
        await pool.streams.seal("0:1")
        await pool.streams.confirm("0:1")
        await pool.continue_()
        await plain_post(engines[0].url + LABELS, {"new_version": "default"})  # as at its start
        await pool.pause("retract")
        assert (await pool.streams.open("retract")).group is None
        await pool.streams.abandon("0:1")

    run_with([engine.url for engine in engines], work)


def test_a_new_life_takes_an_engine_only_if_it_holds_what_was_streamed(engines: list[ScriptedEngine]) -> None:
    current, other = engines

    async def first(pool: EnginePool) -> None:
        await stream(pool, "0:5")

    async def second(pool: EnginePool) -> None:
        pool.weights.expect_streamed("0:5")
        await asyncio.gather(*(ask(pool, f"r{i}") for i in range(4)))
        assert (len(sent(current)), len(sent(other))) == (4, 0)

    run_with([current.url], first)
    run_with([other.url], lambda pool: stream(pool, "0:4"))
    for engine in engines:
        engine.clear()
    run_with([engine.url for engine in engines], second)


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, SLICE_BYTES, 2 * SLICE_BYTES + 1])
@pytest.mark.parametrize("count", [1, 3])
def test_a_body_that_is_made_in_slices_is_the_whole_json(num_bytes: int, count: int, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(num_bytes)
    (tmp_path / "bucket").write_bytes(content)

    async def made() -> bytes:
        async with TensorFile(str(tmp_path / "bucket")) as file:
            body = file.body(count)
            first, second = [b"".join([part async for part in body.chunks()]) for _ in range(2)]
            assert first == second
            assert len(first) == body.num_bytes
            return first

    tree = json.loads(asyncio.run(made()))
    assert [base64.b64decode(entry) for entry in tree.pop("serialized_named_tensors")] == [content] * count
    assert tree == {"flush_cache": False, "abort_all_requests": False}


def test_a_bucket_that_is_gone_is_told_as_it_is(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    async def work(pool: EnginePool) -> None:
        await pool.pause("retract")
        await pool.streams.open("retract")
        with pytest.raises(ControlFailed, match="a bucket of weights must be there"):
            await pool.streams.take_tensors(str(tmp_path / "gone"))
        await pool.streams.abandon("default")

    run_with([engine.url for engine in engines], work)


def test_a_large_bucket_is_sent_beside_everything_else_and_is_never_held_whole(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    with bucket.open("wb") as file:
        for number in range(256):
            file.write(random.Random(number).randbytes(1 << 20))
    turns, growth_bytes = 0, 0

    async def watch(process: psutil.Process) -> None:
        nonlocal turns, growth_bytes
        before = process.memory_info().rss
        while True:
            turns += 1
            growth_bytes = max(growth_bytes, process.memory_info().rss - before)
            await asyncio.sleep(0.001)

    async def work(pool: EnginePool) -> None:
        await pool.pause("retract")
        await pool.streams.open("retract")
        watcher = asyncio.create_task(watch(psutil.Process()))
        await pool.streams.take_tensors(str(bucket))
        watcher.cancel()
        await pool.streams.abandon("default")

    with ScriptedEngine.start(lengths=Lengths(tokens=8)) as engine:
        run_with(engine, work, policy=quick(update_timeout_s=100.0))
        assert engine.state()["weight_version"] == IN_PIECES
    assert turns > 50  # the loop had its turn between slices
    assert growth_bytes < bucket.stat().st_size // 3
