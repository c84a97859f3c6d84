"""Pushes without files, from the hook through hub and generator to an engine, and what goes wrong there."""

import base64
import json
import pickle
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fa_rollout.client.engine.labels import IN_PIECES
from tests.hub.rig import WITH_SPARE, Rig
from tests.kit.scripted import Rule, ScriptedEngine
from trainer_hook import TrainerHook
from trainer_hook.errors import WeightsMismatch, WeightUpdateFailed
from trainer_hook.model.index import ModelIndex

MakeRig = Callable[..., Rig]

TENSORS = "/update_weights_from_tensor"
STATE = {f"weight{index}": torch.full((1000,), float(index)) for index in range(5)}
BY_TENSOR = {"publish": "tensor", "bucket_bytes": 8000, "num_ranks": 2}


@pytest.fixture(autouse=True)
def _plain(engine: ScriptedEngine) -> None:
    engine.configure(rules=[])
    engine.clear()


def taken(engine: ScriptedEngine) -> list[dict[str, torch.Tensor]]:
    """The buckets that came, in their order."""
    return [
        dict(pickle.loads(base64.b64decode(r.body["serialized_named_tensors"][0])))
        for r in engine.requests(TENSORS)
    ]


def on_both_ranks(rig: Rig, work: Callable[[int, TrainerHook], object]) -> list[object]:
    """What it returned or raised, by rank."""

    def one(rank: int) -> object:
        with rig.attach(rank, 2) as hook:
            both.wait(20)  # nobody leaves before all have come
            try:
                return work(rank, hook)
            except WeightUpdateFailed as error:
                return error
            finally:
                both.wait(60)

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def push(_: int, hook: TrainerHook) -> int:
    with hook.update_weights() as update:
        update.push(STATE)
    return hook.version


def relabel(engine: ScriptedEngine, label: str) -> None:
    """As somebody else might."""
    body = json.dumps({"new_version": label}).encode()
    request = urllib.request.Request(f"{engine.url}/update_weight_version", data=body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        assert answer.status == 200


def labels(engine: ScriptedEngine) -> list[str]:
    return [r.body["new_version"] for r in engine.requests("/update_weight_version")]


def test_every_bucket_arrives_once_in_order_and_the_version_is_published_at_the_end(
    rig: MakeRig, engine: ScriptedEngine, tmp_path: Path
) -> None:
    with rig(trainer=BY_TENSOR | {"weights_dir": str(tmp_path)}) as run:
        assert on_both_ranks(run, push) == [1, 1]
        buckets = taken(engine)
        assert [len(bucket) for bucket in buckets] == [2, 2, 1]
        whole = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
        assert list(whole) == list(STATE)
        assert all(torch.equal(whole[name], tensor) for name, tensor in STATE.items())
        first, last = labels(engine)[-2:]
        assert first == IN_PIECES
        assert last.endswith(":1")
        assert not list(tmp_path.rglob("bucket-*"))


def test_a_generator_that_is_killed_in_the_middle_costs_a_second_pass(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    with rig(trainer=BY_TENSOR, run=WITH_SPARE) as run:
        first = run.generator().pid

        def kill(rank: int, hook: TrainerHook) -> int:
            if rank == 0:
                engine.configure(rules=[Rule(path=TENSORS, skip=1, times=1, delay_s=60.0)])
                killer.start()
            return push(rank, hook)

        def when_the_second_bucket_is_under_way() -> None:
            run.until(lambda: len(engine.requests(TENSORS)) == 2)
            run.generator().kill()

        killer = threading.Thread(target=when_the_second_bucket_is_under_way)
        assert on_both_ranks(run, kill) == [1, 1]
        killer.join()
        assert run.generator().pid != first
        assert [len(bucket) for bucket in taken(engine)] == [2, 2, 2, 2, 1]
        assert labels(engine)[-1].endswith(":1")


def test_an_engine_that_is_lost_in_the_middle_costs_a_second_pass(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    with rig(trainer=BY_TENSOR) as run:

        def lose(rank: int, hook: TrainerHook) -> int:
            if rank == 0:
                engine.configure(rules=[Rule(path=TENSORS, skip=1, times=1, drop="before")])
            return push(rank, hook)

        assert on_both_ranks(run, lose) == [1, 1]
        assert [len(bucket) for bucket in taken(engine)] == [2, 2, 2, 2, 1]


def test_a_refusal_fails_the_update_on_every_rank_and_the_next_one_works(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    with rig(trainer=BY_TENSOR) as run:
        engine.configure(rules=[Rule(path=TENSORS, status=400, body='{"message":"no such weight"}')])
        first, second = on_both_ranks(run, push)
        assert isinstance(first, WeightUpdateFailed)
        assert "no such weight" in str(first)
        assert isinstance(second, WeightUpdateFailed)
    with rig(trainer=BY_TENSOR) as run:
        engine.configure(rules=[])
        assert on_both_ranks(run, push) == [1, 1]


def test_a_rank_that_raises_ends_the_stage_that_the_leader_waits_for(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    with rig(trainer=BY_TENSOR) as run:
        engine.configure(rules=[Rule(path=TENSORS, delay_s=600.0, times=1)])
        is_under_way = threading.Event()

        class Broken(torch.Tensor):
            def full_tensor(self) -> torch.Tensor:
                run.until(lambda: len(engine.requests(TENSORS)) == 1)
                is_under_way.set()
                raise KeyError("a bug of the trainer's")

        broken = {name: tensor.as_subclass(Broken) for name, tensor in STATE.items()}

        def work(rank: int, hook: TrainerHook) -> int:
            try:
                with hook.update_weights() as update:
                    update.push(broken if rank == 1 else STATE)
            except KeyError:
                return -1
            return 0

        leader, other = on_both_ranks(run, work)
        assert is_under_way.is_set()
        assert other == -1
        assert isinstance(leader, WeightUpdateFailed)
        assert "a bug of the trainer's" in str(leader)


def test_ranks_that_catch_a_failed_push_may_push_files_in_the_same_block(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    def work(_: int, hook: TrainerHook) -> int:
        with hook.update_weights() as update:
            with pytest.raises(WeightUpdateFailed, match="no such weight"):
                update.push(STATE)
            update.push(STATE, via="disk")
        return hook.version

    with rig(trainer=BY_TENSOR) as run:
        engine.configure(rules=[Rule(path=TENSORS, status=400, body='{"message":"no such weight"}')])
        assert on_both_ranks(run, work) == [1, 1]
        (loaded,) = engine.requests("/update_weights_from_disk")
        assert loaded.body["weight_version"].endswith(":1")
        assert engine.state()["pause_mode"] is None
        engine.clear()
        with run.attach(0, 2) as first, run.attach(1, 2) as second, ThreadPoolExecutor(2) as pool:
            steps = list(pool.map(train_a_step, (first, second)))
        assert steps[0] == steps[1]


def train_a_step(hook: TrainerHook) -> int:
    with hook.next_batch() as batch:
        return batch.step


@pytest.mark.parametrize("via", ["tensor", "disk"])
def test_weights_that_do_not_fit_on_one_rank_are_sent_by_none(
    rig: MakeRig, engine: ScriptedEngine, tmp_path: Path, via: str
) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    short = STATE | {"weight3": torch.zeros(999)}

    def work(rank: int, hook: TrainerHook) -> object:
        with pytest.raises(WeightsMismatch, match=r"weight3 \[999\]"), hook.update_weights() as update:
            update.push(short if rank == 1 else STATE, via=via)
        with pytest.raises(WeightsMismatch, match="missing"), hook.update_weights() as update:
            update.push({"weight3": STATE["weight3"]}, via=via)
        assert hook.version == 0
        with hook.update_weights() as update:
            update.push({"weight3": STATE["weight3"] * 2}, via=via, partial=True)
        return hook.version

    with rig(trainer=BY_TENSOR, engine={"model": str(tmp_path)}) as run:
        assert on_both_ranks(run, work) == [1, 1]
        if via == "tensor":
            assert [list(bucket) for bucket in taken(engine)] == [["weight3"]]
        else:
            (load,) = engine.requests("/update_weights_from_disk")
            index = ModelIndex.read(Path(load.body["model_path"]))
            assert index.kinds.keys() == STATE.keys()


def test_a_part_waits_for_all_weights_where_an_engine_does_not_hold_the_version_before(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    part = {"weight3": STATE["weight3"]}

    def work(_: int, hook: TrainerHook) -> int:
        with pytest.raises(WeightUpdateFailed, match="all weights"), hook.update_weights() as update:
            update.push(part, partial=True)
        with hook.update_weights() as update:
            update.push(STATE)
        with hook.update_weights() as update:
            update.push(part, partial=True)
        return hook.version

    with rig(trainer=BY_TENSOR) as run:
        run.until(lambda: engine.state()["weight_version"].endswith(":0"))
        relabel(engine, "somebody's")
        assert len(set(on_both_ranks(run, work))) == 1


def test_a_generator_held_up_by_a_stage_is_not_replaced(rig: MakeRig, engine: ScriptedEngine) -> None:
    engine.configure(rules=[Rule(path=TENSORS, delay_s=1.0, times=1)])
    run = rig(trainer={"publish": "tensor", "bucket_bytes": "256MiB"}, run={"heartbeat_s": 1.0})
    state = {"weight": torch.zeros(1 << 24)}  # 64 MiB

    def hold_up() -> None:
        run.until(lambda: engine.requests(TENSORS))
        generator = run.generator()
        generator.suspend()
        time.sleep(2.5)
        generator.resume()

    with run, run.attach() as hook, ThreadPoolExecutor(1) as pool:
        with hook.next_batch():
            pass
        holding = pool.submit(hold_up)
        with hook.update_weights() as update:
            update.push(state)
        holding.result()
        assert update.version == 1
    assert not run.events("generator_died")
