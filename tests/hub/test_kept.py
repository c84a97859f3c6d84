"""What a checkpoint keeps of unfinished groups: records whole, samples under way with their tokens."""

import base64
import json
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.hub.rig import VOCAB_SIZE, Rig, add_up
from tests.hub.test_ranks import side_by_side
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import TrainerHook
from trainer_hook.calls.checkpoint import KEPT
from trainer_hook.calls.kept import KeptPartial, KeptRecord, index_of, read, unpack
from trainer_hook.errors import HookStateError

MakeRig = Callable[..., Rig]
Keys = list[tuple[int, int]]
"""(group, member)"""
ALL = [(group, member) for group in range(24) for member in range(2)]


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[ScriptedEngine]:
    """Answers that are under way for a while, so that there is something to keep of them."""
    script = Script(
        vocab_size=VOCAB_SIZE, lengths=Lengths(kind="uniform", low=80, high=120), tokens_per_s=150.0
    )
    with ScriptedEngine.start(script) as engine:
        yield engine


@pytest.fixture
def slow(tmp_path: Path, slow_engine: ScriptedEngine) -> Callable[..., Rig]:
    return lambda **changes: Rig(tmp_path / "run", slow_engine, **changes)


def train(hook: TrainerHook, num_steps: int, seen: Keys) -> None:
    for _ in range(num_steps):
        with hook.next_batch() as batch:
            seen += [(sample.group, sample.member) for sample in batch.samples]
        with hook.update_weights():
            pass


def resume(hook: TrainerHook, state: dict[str, Any]) -> None:
    hook.load_state_dict(state)
    with hook.update_weights():
        pass


def counts(hook: TrainerHook) -> Counter[str]:
    """Places of groups; zeros before the data is read."""
    return Counter(hook.statistics().hub["counts"])


def first_requests(engine: ScriptedEngine) -> dict[str, int]:
    """By sample, `gGROUP.ATTEMPT-mMEMBER`: tokens that its first request brought."""
    found: dict[str, int] = {}
    for request in engine.requests("/generate"):
        name = "-".join((request.rid or "").split("-")[2:4])
        found.setdefault(name, request.num_input_ids)
    return found


def kept_of(state: dict[str, Any], folder: Path) -> dict[int, KeptRecord | KeptPartial]:
    block = base64.b64decode(state[KEPT])
    path = folder / "block"
    path.write_bytes(block)
    return {entry.group: read(str(path), entry) for entry in index_of(block)}


def life(run: Rig) -> list[dict[str, Any]]:
    """Events of the hub's last life."""
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    last = max(index for index, event in enumerate(events) if event["event"] == "began")
    return events[last:]


def groups_in(events: list[dict[str, Any]], name: str, key: str = "groups") -> set[int]:
    return {group for event in events if event["event"] == name for group in event[key]}


def stored(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Through every usual way to save a checkpoint, one after the other."""
    torch.save(json.loads(json.dumps(state)), folder / "state.pt")
    loaded: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    dcp.save({"rollout": loaded}, checkpoint_id=folder / "dcp", no_dist=True)
    # As a trainer does it: into the state of a fresh hook, which has nothing to keep.
    target = {"rollout": {**state, "step": 0, "cursor": 0, "unfinished": [], KEPT: ""}}
    dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True)
    return target["rollout"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_finished_groups_go_back_into_the_ring_and_are_not_made_again(rig: MakeRig, tmp_path: Path) -> None:
    seen: Keys = []
    with rig() as run:
        hook = run.attach()
        train(hook, 1, seen)
        run.until(lambda: counts(hook)["committed"] >= 8)
        state = hook.state_dict(payload=True)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        hook.close()
    kept = kept_of(state, tmp_path)
    whole = {name for name, group in kept.items() if isinstance(group, KeptRecord)}
    assert len(whole) >= 8
    tokens: dict[int, bytes] = {}
    with rig() as run, run.attach() as hook:
        resume(hook, stored(state, tmp_path))
        assert hook.step == 1
        for _ in range(5):
            with hook.next_batch() as batch:
                seen += [(sample.group, sample.member) for sample in batch.samples]
                for sample in batch.samples:
                    if sample.member == 0:
                        tokens[sample.group] = sample.arrays.tokens.tobytes()
            with hook.update_weights():
                pass
        run.until(lambda: not list((run.folder / "private" / "spool").glob("kept-*")))  # the file goes too
        assert add_up(run.stop().counts)
        events = life(run)
    assert sorted(seen) == ALL
    assert groups_in(events, "loaded", "restored") == whole
    assert not groups_in(events, "dispatched") & whole, "what was kept whole is sent to no engine"
    for name in whole:
        record = kept[name]
        assert isinstance(record, KeptRecord)
        arrays = [array.array for array in record.arrays]
        assert tokens[name] == arrays[0][: arrays[1][1]].tobytes()


def test_running_samples_go_on_from_the_tokens_that_they_had(
    slow: MakeRig, slow_engine: ScriptedEngine, tmp_path: Path
) -> None:
    seen: Keys = []
    with slow() as run:
        hook = run.attach()
        run.until(lambda: counts(hook)["running"] == 12)
        run.until(lambda: run.engine.state()["num_running"] == 24)
        state = hook.state_dict(interrupt=True)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        hook.close()
    kept = kept_of(state, tmp_path)
    so_far = {
        (name, sample.member): len(sample.ids.array)
        for name, group in kept.items()
        if isinstance(group, KeptPartial)
        for sample in group.samples
    }
    assert so_far
    slow_engine.clear()
    with slow() as run, run.attach() as hook:
        hook.load_state_dict(state)
        prompt_lengths: dict[int, int] = {}
        for _ in range(6):
            with hook.next_batch() as batch:
                seen += [(sample.group, sample.member) for sample in batch.samples]
                prompt_lengths |= {sample.group: sample.prompt_length for sample in batch.samples}
            with hook.update_weights():
                pass
        assert add_up(run.stop().counts)
        assert groups_in(life(run), "loaded", "resumed") == set(kept)
    assert sorted(seen) == ALL
    sent = first_requests(slow_engine)
    for (group, member), num_tokens in so_far.items():
        assert sent[f"g{group}.1-m{member}"] == prompt_lengths[group] + num_tokens


def test_ranks_that_ask_between_two_steps_get_one_state_and_any_number_of_ranks_goes_on(
    slow: MakeRig, tmp_path: Path
) -> None:
    """As a checkpoint that all ranks save in pieces needs it; groups are under way and come in meanwhile."""
    states: list[dict[str, Any]] = [{}, {}]
    seen: Keys = []
    has_gone_on, both_have_saved = threading.Event(), threading.Event()
    with slow() as run:

        def save(rank: int) -> None:
            with run.attach(rank, 2) as hook:
                train(hook, 1, seen)
                if rank == 0:
                    states[0] = hook.state_dict(payload=True)
                    with hook.next_batch():  # the run goes on
                        has_gone_on.set()
                        both_have_saved.wait(30)
                else:
                    has_gone_on.wait(30)
                    states[1] = hook.state_dict(payload=True)
                    both_have_saved.set()
                    with hook.next_batch():
                        pass

        assert side_by_side(lambda: save(0), lambda: save(1)) == []
    assert states[0]
    assert states[0] == states[1]
    with slow() as run, run.attach() as hook:
        resume(hook, states[1])
        train(hook, 5, seen)
        assert add_up(run.stop().counts)
    assert sorted(seen) == ALL


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"payload": True, "interrupt": True}, {}])
def test_every_group_is_trained_once_through_kills_at_any_moment(
    slow: MakeRig, options: dict[str, bool]
) -> None:
    """Three lives, and 11 prompts an epoch: the kills fall on both sides of its edges."""
    seen: Keys = []
    state: dict[str, Any] | None = None
    for is_last in (False, False, True):
        with slow() as run:
            hook = run.attach()
            if state is not None:
                resume(hook, state)
            train(hook, 2, seen)
            state = hook.state_dict(**options)
            if not is_last:
                with hook.next_batch() as batch:  # no checkpoint covers it
                    assert batch.samples
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
            hook.close()
    assert state is not None
    assert state["ends"]["trained"] == 24
    assert sorted(seen) == ALL


def test_an_older_checkpoint_brings_its_own_back_and_nothing_of_the_branch_after_it(rig: MakeRig) -> None:
    first: Keys = []
    second: Keys = []
    with rig() as run:
        with run.attach() as hook:
            train(hook, 1, first)
            run.until(lambda: counts(hook)["committed"] >= 8)
            state = hook.state_dict(payload=True)
            lineage = hook.lineage
            train(hook, 3, [])
        with run.attach() as hook:
            resume(hook, state)
            assert hook.lineage != lineage
            for _ in range(5):
                with hook.next_batch() as batch:
                    second += [(sample.group, sample.member) for sample in batch.samples]
                    assert batch.staleness is not None
                    assert batch.staleness <= 2
                with hook.update_weights():
                    pass
        assert add_up(run.stop().counts)
        assert groups_in(life(run), "loaded", "restored"), "groups that were trained since come back whole"
    assert sorted(first + second) == ALL


@pytest.mark.slow
def test_what_does_not_fit_the_bound_is_told_and_starts_anew(
    rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: Keys = []
    with rig(trainer={"checkpoint_bytes": 2000}) as run:
        hook = run.attach()
        train(hook, 1, seen)
        run.until(lambda: counts(hook)["committed"] >= 8)
        with caplog.at_level(logging.WARNING):
            state = hook.state_dict(payload=True)
        assert "checkpoint_bounded" in caplog.text
        hook.close()
    block = base64.b64decode(state[KEPT])
    assert 0 < sum(len(group.data) for group in unpack(block)) <= 2000
    with rig() as run, run.attach() as hook:
        resume(hook, state)
        train(hook, 5, seen)
        assert add_up(run.stop().counts)
    assert sorted(seen) == ALL


@pytest.mark.slow
def test_tokens_of_other_sampling_parameters_are_not_gone_on_from(
    slow: MakeRig, slow_engine: ScriptedEngine
) -> None:
    with slow() as run, run.attach() as hook:
        run.until(lambda: counts(hook)["running"] == 12)
        run.until(lambda: run.engine.state()["num_running"] == 24)
        state = hook.state_dict(interrupt=True)
    assert state[KEPT]
    slow_engine.clear()
    with slow(sampling={"temperature": 0.5}) as run, run.attach() as hook:
        hook.load_state_dict(state)
        train(hook, 1, [])
        assert add_up(run.stop().counts)
    sizes = {number for name, number in first_requests(slow_engine).items() if ".1-m" in name}
    assert max(sizes) < 20, "first requests bring the prompt alone"


def test_a_state_whose_kept_part_was_damaged_is_refused_with_the_way_out(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        run.until(lambda: counts(hook)["committed"] == 12)
        state = hook.state_dict(payload=True)
        block = base64.b64decode(state[KEPT])
        for damaged in (b"junk", block[:100], block[:-1], b"x" + block[1:]):
            broken = state | {KEPT: base64.b64encode(damaged).decode()}
            with pytest.raises(HookStateError, match='remove "kept" from the state'):
                hook.load_state_dict(broken)
        with pytest.raises(HookStateError, match="text that"):
            hook.load_state_dict(state | {KEPT: b"bytes"})


@pytest.mark.slow
def test_the_bound_on_staleness_holds_for_what_was_kept(rig: MakeRig, tmp_path: Path) -> None:
    """Tokens too old for the next version are made anew under `wait`, whatever the checkpoint kept."""
    seen: Keys = []
    with rig(rollout={"staleness": 4}) as run, run.attach() as hook:
        train(hook, 1, seen)
        run.until(lambda: counts(hook)["committed"] >= 16)
        for _ in range(2):
            with hook.update_weights():
                pass
        state = hook.state_dict(payload=True)
    kept = kept_of(state, tmp_path)
    assert kept
    with rig(rollout={"staleness": 1}) as run, run.attach() as hook:
        resume(hook, state)
        for _ in range(5):
            with hook.next_batch() as batch:
                seen += [(sample.group, sample.member) for sample in batch.samples]
                assert batch.staleness is not None
                assert batch.staleness <= 1
            with hook.update_weights():
                pass
        assert add_up(run.stop().counts)
    assert sorted(seen) == ALL


def test_a_checkpoint_between_a_step_and_its_update_has_newer_weights_than_its_version(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        train(hook, 1, [])
        with hook.next_batch():
            pass
        state = hook.state_dict()
    assert (state["version"], state["handed"]) == (1, 4)
    with rig() as run, run.attach() as hook:
        hook.load_state_dict(state)
        with hook.update_weights() as update:
            assert update.version == 2
