"""The plug-in in the real slime: its own contract tests, and trainings by its own `train_async`.

Needs a checkout (FA_ROLLOUT_SLIME_DIR) and an interpreter that has what slime's CPU tests need, Ray and
sglang-router included (FA_ROLLOUT_SLIME_PYTHON); `scripts/check_slime` sets both.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fa_rollout.engines.scripted import Lengths, Script, ScriptedEngine

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SLIME = os.environ.get("FA_ROLLOUT_SLIME_DIR", "")
PYTHON = os.environ.get("FA_ROLLOUT_SLIME_PYTHON", sys.executable)
BATCH, NUM_SAMPLES = 4, 2

pytestmark = [
    pytest.mark.slime,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SLIME, reason="FA_ROLLOUT_SLIME_DIR names no checkout of slime"),
]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([SLIME, str(HERE / "pretend"), str(ROOT)])
    fixed = {
        "PYTHONPATH": path,
        "SLIME_HOST_IP": "127.0.0.1",
        "TQDM_DISABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **fixed, **changes}


@pytest.fixture
def engines() -> Iterator[Callable[..., list[ScriptedEngine]]]:
    started: list[ScriptedEngine] = []

    def start(num_engines: int, **script: Any) -> list[ScriptedEngine]:
        plain = {
            "protocol": "0.5.15",
            "vocab_size": 300,
            "lengths": Lengths(kind="lognormal", tokens=40, high=200),
        }
        started.extend(ScriptedEngine.start(Script(**(plain | script))) for _ in range(num_engines))
        return started

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, a shape and some prompts, as slime reads them."""
    folder = tmp_path_factory.mktemp("model")
    code = (
        "import sys; from tokenizers import Tokenizer, models, pre_tokenizers\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "letters = pre_tokenizers.ByteLevel.alphabet()\n"
        "words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[]))\n"
        "words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
        "PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([PYTHON, "-c", code, str(folder)], check=True, env=environment())
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 300,
    }
    shape |= {
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
    }
    shape |= {"tie_word_embeddings": True, "rope_theta": 10000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(shape))
    rows = [{"text": f"{i:05d} is the number of this prompt", "label": str(i)} for i in range(400)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    return folder


class Training:
    """One run of `training.py`."""

    def __init__(
        self, folder: Path, model: Path, engines: list[ScriptedEngine], *options: str, **env: str
    ) -> None:
        self.log = folder / f"steps-{len(list(folder.iterdir()))}.jsonl"
        self.output = self.log.with_suffix(".txt")
        addresses = ",".join(engine.url.removeprefix("http://") for engine in engines)
        words = [PYTHON, str(HERE / "training.py"), addresses, str(self.log), "--"]
        words += ["--hf-checkpoint", str(model), "--prompt-data", str(model / "prompts.jsonl")]
        words += ["--input-key", "text", "--label-key", "label", "--rollout-max-response-len", "256"]
        words += ["--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", str(NUM_SAMPLES)]
        words += ["--global-batch-size", str(BATCH * NUM_SAMPLES), "--advantage-estimator", "grpo"]
        words += ["--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "8"]
        words += [
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            "32768",
            "--sglang-server-concurrency",
            "8",
        ]
        words += ["--custom-rm-path", "tests.slime.real.plugins.reward"]
        words += ["--rollout-function-path", "fa_rollout.entry", *options]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                words, env=environment(**env), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> list[dict[str, Any]]:
        try:
            code = self.process.wait(timeout=400)
        finally:
            self.end()
        assert code == 0, self.output.read_text()[-6000:]
        return self.steps()

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def below(self, word: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if any(word in part for part in process.cmdline())]

    def end(self) -> None:
        """End whatever is left of this run's own session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def trained(*parts: list[dict[str, Any]]) -> list[int]:
    return [index for part in parts for step in part for index in step["indices"]]


def test_slimes_own_contract_tests_pass_with_our_entry(tmp_path: Path, model: Path, engines: Any) -> None:
    (engine,) = engines(1)
    router = ScriptedEngine.start(Script(workers=[engine.url]))
    try:
        contract = Path(SLIME, "tests", "plugin_contracts", "test_plugin_rollout_contracts.py")
        words = [PYTHON, str(contract), "--rollout-function-path", "tests.slime.real.contract.entry", "-q"]
        where = {"FA_ROLLOUT_TEST_ROUTER": router.url, "FA_ROLLOUT_TEST_MODEL": str(model)}
        done = subprocess.run(words, env=environment(**where), cwd=tmp_path, capture_output=True, text=True)
    finally:
        router.stop()
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_prompt_is_trained_once_with_evaluation_and_two_ranks(
    tmp_path: Path, model: Path, engines: Any
) -> None:
    made = engines(2, tokens_per_s=150.0)
    evaluation = ["--eval-interval", "2", "--eval-prompt-data", "few", str(model / "few.jsonl")]
    evaluation += [
        "--eval-input-key",
        "text",
        "--eval-label-key",
        "label",
        "--n-samples-per-eval-prompt",
        "1",
    ]
    run = Training(
        tmp_path, model, made, "--num-rollout", "6", "--partial-rollout", *evaluation,
        "--actor-num-gpus-per-node", "2",
    )  # fmt: skip
    steps = run.wait()
    assert sorted(trained(steps)) == list(range(6 * BATCH * NUM_SAMPLES))
    assert "eval/few" in run.output.read_text()


def test_a_killed_generator_costs_no_prompt(tmp_path: Path, model: Path, engines: Any) -> None:
    made = engines(1, tokens_per_s=150.0)
    run = Training(tmp_path, model, made, "--num-rollout", "6", "--partial-rollout")
    deadline_s = time.monotonic() + 200
    while len(run.steps()) < 2:
        assert time.monotonic() < deadline_s, run.output.read_text()[-6000:]
        assert run.process.poll() is None, run.output.read_text()[-6000:]
        time.sleep(0.1)
    for process in run.below("fa_rollout.slime.generator"):
        process.kill()
    assert sorted(trained(run.wait())) == list(range(6 * BATCH * NUM_SAMPLES))
    assert "start again with the next one" in run.output.read_text()


def test_save_and_resume_lose_nothing(tmp_path: Path, model: Path, engines: Any) -> None:
    made = engines(1, tokens_per_s=150.0)
    save = tmp_path / "checkpoint"
    save.mkdir()
    options = ["--partial-rollout", "--save", str(save), "--save-interval", "1"]
    first = Training(tmp_path, model, made, "--num-rollout", "5", *options).wait()
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    options += ["--num-rollout", "8", "--load", str(save)]
    second = Training(tmp_path, model, made, *options, FA_ROLLOUT_TEST_START="3").wait()
    everything = trained([step for step in first if step["step"] < 3], second)
    assert sorted(everything) == list(range(8 * BATCH * NUM_SAMPLES))


def test_fan_out_and_the_fast_conversion_go_through_slimes_own_steps(
    tmp_path: Path, model: Path, engines: Any
) -> None:
    made = engines(1)
    options = ["--custom-generate-function-path", "tests.slime.real.plugins.two_of_each"]
    options += ["--custom-convert-samples-to-train-data-path", "fa_rollout.convert_samples_to_train_data"]
    steps = Training(tmp_path, model, made, "--num-rollout", "3", "--partial-rollout", *options).wait()
    counts = {index: trained(steps).count(index) for index in trained(steps)}
    assert counts == dict.fromkeys(range(3 * BATCH * NUM_SAMPLES), 2)


def test_an_exception_of_a_reward_ends_the_training_with_its_traceback(
    tmp_path: Path, model: Path, engines: Any
) -> None:
    made = engines(1)
    run = Training(
        tmp_path, model, made, "--num-rollout", "3", "--custom-rm-path", "tests.slime.real.plugins.raises"
    )
    try:
        assert run.process.wait(timeout=300) != 0
    finally:
        run.end()
    text = run.output.read_text()
    assert "ArithmeticError: no reward of this kind" in text
    assert "plugins.py" in text
