"""A job of two nodes: two hubs, generators and engines that share nothing, one of them slow."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from fa_rollout.ranks import environment
from tests.hub.rig import NUM_PROMPTS, VOCAB_SIZE, Rig
from tests.kit.scripted import Lengths, Script, ScriptedEngine

pytestmark = pytest.mark.slow

NUM_STEPS = 4
SPEEDS = (400.0, 60.0)
LENGTHS = ((4, 40), (40, 100))
"""The slow node has longer answers, so that it needs more micro-batches."""


class Node:
    """One node: a run, and its rank of the job."""

    def __init__(self, run: Rig, place: int, store: Path) -> None:
        self.run = run
        self.place = place
        job = {
            **environment(place, 2, store),
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            **{"GROUP_RANK": str(place), "GROUP_WORLD_SIZE": "2"},
        }
        self.rank = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.node_trainer", str(run.folder)],
            env={**run.environment, **job, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def steps(self) -> list[dict[str, Any]]:
        path = self.run.folder / f"seen-{self.place}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self, timeout_s: float) -> tuple[int, str]:
        _, stderr = self.rank.communicate(timeout=timeout_s)
        return self.rank.returncode, stderr

    def kill(self) -> None:
        """As when the machine loses its power."""
        self.rank.kill()
        self.rank.wait()

    def close(self) -> None:
        self.kill()
        if self.rank.stderr is not None:
            self.rank.stderr.close()


@contextmanager
def job(folder: Path, *, shared: ScriptedEngine | None = None) -> Iterator[list[Node]]:
    """A job of two nodes, in the folders of the one before.

    Nobody tells the runs which node is whose, unless both use the one engine that is `shared`.
    """
    store = Path(tempfile.mkdtemp(dir=folder))  # of this job alone: a file holds those of the one before
    with ExitStack() as stack:
        nodes = []
        for place, (speed, (low, high)) in enumerate(zip(SPEEDS, LENGTHS, strict=True)):
            script = Script(
                host=f"127.0.0.{place + 1}",
                vocab_size=VOCAB_SIZE,
                lengths=Lengths(kind="uniform", low=low, high=high),
                tokens_per_s=speed,
            )
            engine = shared or stack.enter_context(ScriptedEngine.start(script))
            run = Rig(
                folder / f"node{place}",
                engine,
                rollout={"num_steps": NUM_STEPS + 2 * place},
                sampling={
                    "max_new_tokens": 80
                },  # an aborted answer may go on for longer than it would have been
                trainer={"max_tokens_per_micro_batch": 130},
                data={"shard": place, "num_shards": 2} if shared else {},
                engine={"shared": shared is not None},
            )
            nodes.append(Node(stack.enter_context(run), place, store))
            stack.callback(nodes[-1].close)
        yield nodes


def until_under_way(node: Node) -> None:
    deadline_s = time.monotonic() + 90
    while not node.steps():
        assert time.monotonic() < deadline_s
        assert node.rank.poll() is None, node.end(1)
        time.sleep(0.05)


def assert_agreed(nodes: Sequence[Node]) -> None:
    """Both saw the same steps, and together every prompt of the data once an epoch."""
    steps = [{step["step"]: step for step in node.steps()} for node in nodes]  # of one trained twice the last
    assert [sorted(one) for one in steps] == [list(range(NUM_STEPS))] * 2, "the shorter run ends both"
    for one, other in ((steps[0][step], steps[1][step]) for step in range(NUM_STEPS)):
        assert one["num_micro_batches"] == other["num_micro_batches"]
        assert one["num_tokens_global"] == one["num_tokens"] + other["num_tokens"]
        assert one["num_samples_global"] == other["num_samples_global"] == 16
        rewards = one["rewards"] + other["rewards"]
        assert one["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    samples = [tuple(s) for one in steps for step in one.values() for s in step["samples"]]
    assert len(set(samples)) == len(samples) == NUM_STEPS * 2 * 8, "no prompt is taken by two nodes"
    assert {epoch for epoch, _, _ in samples} == set(range(-(-NUM_STEPS * 8 // NUM_PROMPTS)))


@pytest.mark.timeout(240)
def test_nodes_share_the_prompts_and_agree_on_every_step(tmp_path: Path) -> None:
    with job(tmp_path) as nodes:
        assert [node.end(120)[0] for node in nodes] == [0, 0]
        assert_agreed(nodes)
        assert [node.run.events("shard")[0]["shard"] for node in nodes] == [0, 1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_node_ends_the_job_with_an_error_that_names_it_and_the_job_goes_on(
    tmp_path: Path, lost: int
) -> None:
    with job(tmp_path) as nodes:
        until_under_way(nodes[lost])
        nodes[lost].kill()
        code, stderr = nodes[1 - lost].end(60)
        assert code != 0
        assert f"PeerLost: all nodes must agree on each step's batch; node {lost} (" in stderr
    with job(tmp_path) as nodes:
        assert [node.end(120)[0] for node in nodes] == [0, 0]
        assert_agreed(nodes)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("protocol", ["0.5.23", "0.5.15"])
def test_nodes_that_share_an_engine_have_it_updated_once_and_both_know_every_version(
    tmp_path: Path, protocol: Literal["0.5.23", "0.5.15"]
) -> None:
    """One release tells the version of every token, the other one label for a whole answer."""
    script = Script(
        protocol=protocol,
        vocab_size=VOCAB_SIZE,
        lengths=Lengths(kind="uniform", low=20, high=60),
        tokens_per_s=200.0,
    )
    with ScriptedEngine.start(script) as engine:
        with job(tmp_path, shared=engine) as nodes:
            ends = [node.end(120) for node in nodes]
            assert [code for code, _ in ends] == [0, 0], "\n".join(stderr for _, stderr in ends)
            assert_agreed(nodes)
            for one, other in zip(*(node.steps() for node in nodes), strict=True):
                assert (one["lineage"], one["version"]) == (other["lineage"], other["version"])
                ages = one["staleness"] + other["staleness"]
                assert None not in ages, "a version that one run does not know is current for none"
                assert max(ages) <= 2
            assert len(engine.requests("/pause_generation")) == NUM_STEPS
        with job(tmp_path, shared=engine) as nodes:
            assert [node.end(120)[0] for node in nodes] == [0, 0], "it goes on where nothing is left to train"
