"""Weights without a whole checkpoint: in requests, by broadcasts, and by files of what has changed alone."""

import asyncio
import base64
import pickle
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch

from fa_rollout.client import Completion, ControlFailed, EnginePool
from fa_rollout.client.engine.labels import IN_PIECES
from tests.conformance.conformance_kit import Http, Target, ask, assert_sampled_by, under_way
from trainer_hook.messages import JoinGroup, TakeBroadcast
from trainer_hook.model.fit import fitting
from trainer_hook.weights.gathering import Gathering, on_host
from trainer_hook.weights.update_group import UpdateGroup, serve_store

BUCKET_BYTES = 1 << 14
Bucket = dict[str, torch.Tensor]


def buckets_of(model: Any) -> list[Bucket]:
    weights = Gathering(fitting(model, None, partial=False), BUCKET_BYTES)
    assert weights.num_buckets > 2
    return list(weights.buckets(on_host))


async def short(pool: EnginePool) -> Completion:
    return await ask(pool, "short", max_new_tokens=20, ignore_eos=True)


async def publish(pool: EnginePool, label: str) -> None:
    await pool.streams.seal(label)
    await pool.streams.confirm(label)
    await pool.continue_()


async def send_tensors(pool: EnginePool, model: Any, label: str) -> None:
    await pool.pause("retract", may_be_none=True)
    await pool.streams.open("retract")
    for bucket in buckets_of(model):
        with NamedTemporaryFile() as file:
            pickle.dump(list(bucket.items()), file, protocol=4)
            file.flush()
            await pool.streams.take_tensors(file.name)
    await publish(pool, label)


class Leader:
    """Rank 0 of a group with the engines of a pool."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.group: UpdateGroup | None = None

    async def open(self) -> None:
        await self._pool.pause("retract", may_be_none=True)
        audience = await self._pool.streams.open("retract")
        if self.group is not None and self.group.name == audience.group:
            return
        store, port = serve_store("127.0.0.1")
        name, size = f"group-{port}", 1 + audience.num_workers
        former = None if self.group is None else self.group.name
        stage = JoinGroup(group=name, former=former, address="127.0.0.1", port=port, backend="gloo")
        meeting = asyncio.to_thread(
            UpdateGroup.join, store, address="127.0.0.1", name=name, rank=0, world_size=size, backend="gloo"
        )
        self.group, _ = await asyncio.gather(meeting, self._pool.streams.join_group(stage))

    async def send(self, bucket: Bucket) -> None:
        group = self.group
        assert group is not None
        works = [group.broadcast(tensor) for tensor in bucket.values()]
        await self._pool.streams.take_broadcast(self.stage(bucket))
        for work in works:
            await asyncio.to_thread(work.wait)

    def stage(self, bucket: Bucket) -> TakeBroadcast:
        assert self.group is not None
        return TakeBroadcast(
            group=self.group.name,
            names=list(bucket),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            shapes=[list(tensor.shape) for tensor in bucket.values()],
        )


def test_tensors_in_requests_replace_the_weights_bucket_by_bucket(
    target: Target, model: Any, other: Any
) -> None:
    async def work(pool: EnginePool) -> tuple[Completion, Completion, Completion]:
        before = await short(pool)
        await send_tensors(pool, other, "0:1")
        assert await pool.weights.versions() == {target.engine_url: "0:1"}
        after = await short(pool)
        await send_tensors(pool, model, "0:2")
        return before, after, await short(pool)

    before, after, again = target.with_pool(work)
    assert [c.versions for c in (before, after, again)] == [
        (("default", 20),),
        (("0:1", 20),),
        (("0:2", 20),),
    ]
    assert_sampled_by(model, before)
    assert_sampled_by(other, after)
    assert_sampled_by(model, again)


def test_broadcasts_of_a_group_replace_the_weights_and_the_group_stays(
    target: Target, model: Any, other: Any
) -> None:
    async def work(pool: EnginePool) -> list[Completion]:
        leader, completions, names = Leader(pool), [], []
        for number, source in enumerate((other, model), start=1):
            await leader.open()
            assert leader.group is not None
            names.append(leader.group.name)
            for bucket in buckets_of(source):
                await leader.send(bucket)
            await publish(pool, f"0:{number}")
            completions.append(await short(pool))
        assert names[0] == names[1]
        assert leader.group is not None
        await pool.streams.forget_groups()
        leader.group.leave()
        return completions

    first, second = target.with_pool(work)
    assert (first.versions, second.versions) == ((("0:1", 20),), (("0:2", 20),))
    assert_sampled_by(other, first)
    assert_sampled_by(model, second)


def test_an_answer_that_stood_still_for_a_stream_has_each_versions_log_probs(
    target: Target, model: Any, other: Any
) -> None:
    async def work(pool: EnginePool) -> tuple[Completion, Completion | None]:
        (call,) = await under_way(pool, 1, max_new_tokens=1500)
        if not target.has_spans:  # its version would be told for the whole: the generator aborts it first
            await pool.abort(["r0"])
            first = await call
            await send_tensors(pool, other, "0:1")
            return first, await short(pool)
        await send_tensors(pool, other, "0:1")
        return await call, None

    first, second = target.with_pool(work)
    if second is None:
        (label, end), last = first.versions
        assert (label, last) == ("default", ("0:1", 1500))
        assert_sampled_by(model, first, end=end)
        assert_sampled_by(other, first, start=end)
    else:
        assert_sampled_by(model, first)
        assert_sampled_by(other, second)


async def until_paused(pool: EnginePool) -> None:
    """An engine that is out is known to lack weights alone as soon as it has been probed."""
    async with asyncio.timeout(30):
        while True:
            try:
                await pool.pause("retract")
                return
            except ControlFailed:
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("healer", ["stream", "files"])
def test_a_leader_that_leaves_in_the_middle_is_an_error_at_once_and_the_next_update_heals(
    target: Target, other: Any, healer: str
) -> None:
    async def work(pool: EnginePool) -> Completion:
        leader = Leader(pool)
        await leader.open()
        first, second, *_ = buckets_of(other)
        await leader.send(first)
        assert leader.group is not None
        refused = asyncio.create_task(pool.streams.take_broadcast(leader.stage(second)))
        await asyncio.sleep(0.3)
        leader.group.leave(abort=True)
        async with asyncio.timeout(20):
            with pytest.raises(ControlFailed):
                await refused
        await pool.streams.abandon("default")
        await pool.continue_()
        _, info = await asyncio.to_thread(target.with_http, lambda http: http.control("/model_info"))
        assert info["weight_version"] == IN_PIECES
        waiting = asyncio.create_task(short(pool))
        await asyncio.sleep(1.0)
        assert not waiting.done()  # it holds parts of two versions
        if healer == "stream":
            await send_tensors(pool, other, "0:1")
        else:
            await until_paused(pool)
            await pool.weights.load(str(target.other), "0:1")
            await pool.continue_()
        return await waiting

    completion = target.with_pool(work)
    assert completion.versions == (("0:1", 20),)
    assert_sampled_by(other, completion)


def test_pieces_outside_of_a_session_are_refused_by_newer_engines(target: Target, other: Any) -> None:
    if target.kind == "sglang":
        pytest.skip("0.5.15 knows no sessions")
    pickled = pickle.dumps(list(buckets_of(other)[0].items()))

    async def work(http: Http) -> list[int]:
        body = {"serialized_named_tensors": [base64.b64encode(pickled).decode()], "flush_cache": False}
        outside, answer = await http.control("/update_weights_from_tensor", body)
        assert "must run between" in answer["message"]
        paths = ["begin", "begin", "end", "end"]
        return [outside, *[(await http.control(f"/{path}_weight_update", {}))[0] for path in paths]]

    assert target.with_http(work) == [400, 200, 400, 200, 400]
