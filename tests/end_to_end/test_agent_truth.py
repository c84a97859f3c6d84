"""Agents on a real engine, under weight updates: each trained token was sampled, and is trained once."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.demo.task import CHARACTERS, sorting_prompts
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.end_to_end.recording_proxy import RecordingProxy
from tests.kit.embedded import EmbeddedEngine
from tests.launcher.processes import Launch

NUM_STEPS, NUM_GROUPS, NUM_SAMPLES = 4, 2, 2
CONFIG = """
[data]
path = "{folder}/prompts.jsonl"
[rollout]
num_steps = {num_steps}
groups_per_step = {num_groups}
samples_per_group = {num_samples}
staleness = 2
{agent}
[sampling]
max_new_tokens = 8
seed = 7
[reward]
function = "fa_rollout.demo.task:sorting_reward"
[engine]
urls = ["{url}"]
tokenizer = "{folder}/model"
[ring]
bytes = "1MiB"
[trainer]
num_ranks = 2
[run]
output_dir = "{folder}"
"""
AGENTS = {
    "function": 'agent = "tests.end_to_end.users_agents:talker"',
    "program": f'agent_command = ["{sys.executable}", "-m", "tests.end_to_end.users_agents"]',
}
Answers = Counter[tuple[tuple[int, ...], tuple[int, ...]]]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", AGENTS)
def test_every_trained_token_was_sampled_and_is_trained_once(kind: str, tmp_path: Path) -> None:
    samples, answers = train(kind, tmp_path)
    used: Answers = Counter()
    for sample in samples:
        tokens = tuple(sample["prompt_tokens"] + sample["response_tokens"])
        for start, end in trained_runs(sample):
            parts = next(chain(answers, tokens[:start], tokens[start:end]), None)
            assert parts is not None, "a trained token that the engine never sampled there"
            used.update(parts)
    assert used <= answers, "an answer is trained twice"
    assert max(sample["difference"] for sample in samples) < 1e-4
    assert len({version for sample in samples for version in sample["versions"]}) > 1
    by_rollout = Counter((sample["group"], sample["member"]) for sample in samples)
    assert len(by_rollout) == NUM_STEPS * NUM_GROUPS * NUM_SAMPLES
    if kind == "function":
        assert sum(answers.values()) >= sum(used.values()) >= 6 * len(by_rollout)
        assert set(by_rollout.values()) == {3}, "one of the turns, one of the second answer, one of the edit"
    else:
        assert {sample["reward"] for sample in samples} == {5.0}, "as the program posted it"


def train(kind: str, folder: Path) -> tuple[list[dict[str, Any]], Answers]:
    """A whole run; what the ranks saw, and what the engine answered."""
    model = write_tiny_model(folder / "model", characters=CHARACTERS, seed=1)
    rows = sorting_prompts(64, seed=0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with EmbeddedEngine.start(model) as engine, RecordingProxy(engine.url) as proxy:
        text = CONFIG.format(
            folder=folder,
            url=proxy.url,
            agent=AGENTS[kind],
            num_steps=NUM_STEPS,
            num_groups=NUM_GROUPS,
            num_samples=NUM_SAMPLES,
        )
        (folder / "run.toml").write_text(text)
        trainer = ["-m", "tests.end_to_end.checking_trainer", str(model), str(folder)]
        launch = Launch(folder, sys.executable, "-m", "fa_rollout.ranks", "2", *trainer)
        try:
            assert launch.end(timeout_s=100) == 0, launch.stderr
        finally:
            launch.destroy()
    seen = [(folder / f"seen-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    answers = Counter((tuple(asked), tuple(output)) for asked, output in proxy.answers)
    return [json.loads(line) for lines in seen for line in lines], answers


def trained_runs(sample: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Where a sample is trained, counted from the start of its prompt."""
    start = len(sample["prompt_tokens"])
    for mask, run in groupby(sample["loss_mask"]):
        end = start + len(list(run))
        if mask:
            yield start, end
        start = end


def chain(answers: Answers, asked: tuple[int, ...], rest: tuple[int, ...]) -> Iterator[list[Any]]:
    """Answers that make up a turn: an aborted one is continued by further requests."""
    if not rest:
        yield []
    for length in range(len(rest), 0, -1):
        if (asked, rest[:length]) in answers:
            for more in chain(answers, asked + rest[:length], rest[length:]):
                yield [(asked, rest[:length]), *more]
