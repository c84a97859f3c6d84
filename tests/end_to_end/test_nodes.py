"""A job of two nodes: two hubs, generators and engines that share nothing, one of them slow."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.engines.scripted import Lengths, Script, ScriptedEngine
from tests.hub.rig import NUM_PROMPTS, VOCAB_SIZE, Rig

pytestmark = pytest.mark.slow

NUM_STEPS = 4
SPEEDS = (400.0, 60.0)
LENGTHS = ((4, 40), (40, 100))
"""The slow node has longer answers, so that it needs more micro-batches."""


class Node:
    """One node: a run, and its part of the trainer."""

    def __init__(self, run: Rig, place: int, port: int) -> None:
        self.run = run
        self.output = run.folder / "seen.jsonl"
        command = [sys.executable, "-m", "tests.end_to_end.node_trainer"]
        self.trainer = subprocess.Popen(
            [*command, str(self.output), str(place), str(port)],
            env=run.environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def end(self, timeout_s: float) -> tuple[int, str]:
        _, stderr = self.trainer.communicate(timeout=timeout_s)
        return self.trainer.returncode, stderr


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with ExitStack() as stack:
        found = []
        for place, (speed, (low, high)) in enumerate(zip(SPEEDS, LENGTHS, strict=True)):
            script = Script(
                host=f"127.0.0.{place + 1}",
                vocab_size=VOCAB_SIZE,
                lengths=Lengths(kind="uniform", low=low, high=high),
                tokens_per_s=speed,
            )
            engine = stack.enter_context(ScriptedEngine.start(script))
            run = Rig(
                tmp_path / f"node{place}",
                engine,
                rollout={"num_steps": NUM_STEPS + 2 * place},
                data={"shard": place, "num_shards": 2},
                trainer={"max_tokens_per_micro_batch": 130},
            )
            found.append(Node(stack.enter_context(run), place, port))
        try:
            yield found
        finally:
            for node in found:
                node.trainer.kill()
                node.trainer.wait()
                if node.trainer.stderr is not None:
                    node.trainer.stderr.close()


@pytest.mark.timeout(200)
def test_nodes_share_the_prompts_and_agree_on_every_step(nodes: list[Node]) -> None:
    assert [node.end(120)[0] for node in nodes] == [0, 0]
    steps = [node.steps() for node in nodes]
    assert [len(one) for one in steps] == [NUM_STEPS, NUM_STEPS], "the node with fewer steps ends both"
    for one, other in zip(*steps, strict=True):
        assert one["num_micro_batches"] == other["num_micro_batches"]
        assert one["num_tokens_global"] == one["num_tokens"] + other["num_tokens"]
        assert one["num_samples_global"] == other["num_samples_global"] == 16
        rewards = one["rewards"] + other["rewards"]
        assert one["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    samples = [tuple(sample) for one in steps for step in one for sample in step["samples"]]
    assert len(set(samples)) == len(samples), "no prompt is taken by two nodes"
    epochs = {epoch for epoch, _, _ in samples}
    assert len(samples) == NUM_STEPS * 2 * 8
    assert epochs == set(range(-(-NUM_STEPS * 8 // NUM_PROMPTS)))


@pytest.mark.timeout(200)
def test_a_killed_node_ends_the_other_with_an_error_that_says_so(nodes: list[Node]) -> None:
    one, other = nodes
    deadline_s = time.monotonic() + 60
    while not other.output.exists() or not other.steps():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    other.trainer.kill()
    code, stderr = one.end(30)
    assert code != 0
    assert "PeerLost: all nodes must agree" in stderr
