"""The demo's job, short, with everything real: what the trainer saw is what the engine sampled.

One run, several rules: every prompt accounted for; token ids as sampled; log-probabilities of the weights
that each label names; the staleness bound; each sample on one rank, once; rewards as the task pays.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.demo.task import CHARACTERS, sorting_prompts
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.end_to_end.recording_proxy import RecordingProxy
from tests.kit.embedded import EmbeddedEngine
from tests.kit.sglang_cpu.launch import SGLangServer
from tests.launcher.processes import Launch

NUM_STEPS, NUM_GROUPS, NUM_SAMPLES, STALENESS = 6, 4, 4, 2
CONFIG = """
[data]
path = "{folder}/prompts.jsonl"
[rollout]
num_steps = {num_steps}
groups_per_step = {num_groups}
samples_per_group = {num_samples}
staleness = {staleness}
[sampling]
max_new_tokens = 24
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


class Run:
    """What is left of a run: what each rank saw, what the engine answered, the hub's last word."""

    def __init__(self, folder: Path, answers: list[tuple[list[int], list[int]]]) -> None:
        self.seen: list[list[dict[str, Any]]] = [
            [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]
            for rank in range(2)
        ]
        self.answers = answers
        self.samples = [sample for rank in self.seen for sample in rank]
        self.end = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])


ENGINES = ["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)])]


def start_engine(kind: str, model: Path, folder: Path) -> EmbeddedEngine | SGLangServer:
    if kind == "sglang":
        return SGLangServer.start(model, log=folder / "sglang.log")
    return EmbeddedEngine.start(model)


@pytest.fixture(scope="module", params=ENGINES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    model = write_tiny_model(folder / "model", characters=CHARACTERS, seed=1)
    rows = sorting_prompts(64, seed=0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with start_engine(request.param, model, folder) as engine, RecordingProxy(engine.url) as proxy:
        text = CONFIG.format(
            folder=folder,
            url=proxy.url,
            num_steps=NUM_STEPS,
            num_groups=NUM_GROUPS,
            num_samples=NUM_SAMPLES,
            staleness=STALENESS,
        )
        (folder / "run.toml").write_text(text)
        trainer = ["-m", "tests.end_to_end.checking_trainer", str(model), str(folder)]
        launch = Launch(folder, sys.executable, "-m", "fa_rollout.ranks", "2", *trainer)
        try:
            assert launch.end(timeout_s=100) == 0, launch.stderr
            yield Run(folder, proxy.answers)
        finally:
            launch.destroy()


pytestmark = pytest.mark.slow


def test_every_prompt_is_accounted_for(run: Run) -> None:
    counts = run.end["counts"]
    assert run.end["event"] == "ended"
    assert counts["taken"] == sum(number for name, number in counts.items() if name != "taken")
    assert counts["trained"] == NUM_STEPS * NUM_GROUPS


def test_each_sample_is_trained_once_on_one_rank_and_ranks_step_together(run: Run) -> None:
    identities = Counter((sample["group"], sample["member"]) for sample in run.samples)
    assert set(identities.values()) == {1}
    assert len(identities) == NUM_STEPS * NUM_GROUPS * NUM_SAMPLES
    for rank in run.seen:
        assert {sample["step"] for sample in rank} == set(range(NUM_STEPS))


def test_token_ids_are_those_that_the_engine_sampled(run: Run) -> None:
    # A sample that was aborted for an update is asked for again with what it had: the answers to the longer
    # prompts complete it. So each sample is one answer, or a chain of them.
    answers = {(tuple(asked), tuple(output)) for asked, output in run.answers}
    for sample in run.samples:
        prompt, response = tuple(sample["prompt_tokens"]), tuple(sample["response_tokens"])
        assert any(chain(answers, prompt, response)), (prompt, response)


def chain(answers: set[tuple[Any, ...]], asked: tuple[int, ...], rest: tuple[int, ...]) -> Iterator[bool]:
    for length in range(1, len(rest) + 1):
        if (asked, rest[:length]) in answers:
            yield length == len(rest) or any(chain(answers, asked + rest[:length], rest[length:]))


def test_log_probabilities_are_those_of_the_labelled_weights(run: Run) -> None:
    assert max(sample["difference"] for sample in run.samples) < 1e-4
    assert len({version for sample in run.samples for version in sample["versions"]}) > 2


def test_staleness_is_within_the_bound(run: Run) -> None:
    assert all(0 <= sample["version"] - min(sample["versions"]) <= STALENESS for sample in run.samples)
    assert [sample["version"] for sample in run.samples] == [sample["step"] for sample in run.samples]


def test_labels_and_group_rewards_belong_to_their_samples(run: Run) -> None:
    by_group: dict[int, list[dict[str, Any]]] = {}
    for sample in run.samples:
        assert sample["label"] == "".join(sorted(sample["prompt"][:-1]))
        by_group.setdefault(sample["group"], []).append(sample)
    for members in by_group.values():
        mean = sum(member["reward"] for member in members) / NUM_SAMPLES
        assert members[0]["group_reward_mean"] == pytest.approx(mean, abs=1e-6)
