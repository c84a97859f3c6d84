"""The plug-in in the real slime: its own contract tests, and trainings by its own `train_async`."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.kit.scripted import Script, ScriptedEngine
from tests.slime.real.checkout import HERE, PYTHON, SLIME, environment, needs_checkout, options

BATCH, NUM_SAMPLES = 4, 2

pytestmark = needs_checkout


class Training:
    """One run of `training.py`."""

    def __init__(
        self, folder: Path, model: Path, engines: list[ScriptedEngine], *more: str, **env: str
    ) -> None:
        self.log = folder / f"steps-{len(list(folder.iterdir()))}.jsonl"
        self.output = self.log.with_suffix(".txt")
        addresses = ",".join(engine.url.removeprefix("http://") for engine in engines)
        words = [PYTHON, str(HERE / "training.py"), addresses, str(self.log), "--"]
        words += options(model, batch=BATCH, num_samples=NUM_SAMPLES)
        words += ["--rollout-function-path", "fa_rollout.entry", *more]
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

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < deadline_s, self.output.read_text()[-6000:]
            assert self.process.poll() is None, self.output.read_text()[-6000:]
            time.sleep(0.1)

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


def test_slimes_own_contract_tests_pass_with_our_conversion() -> None:
    contract = Path(SLIME, "tests", "plugin_contracts", "test_plugin_runtime_hook_contracts.py")
    path = "fa_rollout.convert_samples_to_train_data"
    words = [PYTHON, str(contract), "--custom-convert-samples-to-train-data-path", path]
    clean = environment(PYTHONDONTWRITEBYTECODE="1", PYTEST_ADDOPTS="-q -p no:cacheprovider")
    done = subprocess.run(words, env=clean, cwd=SLIME, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout


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
    run.until(lambda: len(run.steps()) >= 2)
    for process in run.below("fa_rollout.slime.generation.generator"):
        process.kill()
    assert sorted(trained(run.wait())) == list(range(6 * BATCH * NUM_SAMPLES))
    assert "start again with the next one" in run.output.read_text()


def test_an_engine_that_is_killed_and_started_anew_costs_no_prompt(
    tmp_path: Path, model: Path, engines: Any
) -> None:
    made = engines(2, tokens_per_s=150.0)
    more = ["--num-rollout", "5", "--partial-rollout"]
    # Long enough that no update, by which slime itself would fail, meets the gap.
    run = Training(tmp_path, model, made, *more, FA_ROLLOUT_TEST_TRAIN_S="6")
    run.until(lambda: len(made[1].requests("/continue_generation")) == 2)
    port = int(made[1].url.rpartition(":")[2])
    made[1].process.kill()
    made[1].process.wait()
    engines(1, tokens_per_s=150.0, port=port)
    assert sorted(trained(run.wait())) == list(range(5 * BATCH * NUM_SAMPLES))


def test_replays_and_seeds_go_through_slimes_own_steps(tmp_path: Path, model: Path, engines: Any) -> None:
    (engine,) = engines(1, tokens_per_s=150.0, experts=(2, 2))
    # slime's image has a router of its own build, which passes on what the public one leaves out.
    router = ScriptedEngine.start(Script(workers=[engine.url], router_drops=False))
    host, port = router.url.removeprefix("http://").split(":")
    more = [
        *(
            "--num-rollout",
            "3",
            "--partial-rollout",
            "--rollout-top-p",
            "0.9",
            "--use-rollout-routing-replay",
        ),
        *("--sglang-router-ip", host, "--sglang-router-port", port),
        "--sglang-enable-deterministic-inference",
    ]
    try:
        steps = Training(tmp_path, model, [engine], *more).wait()
    finally:
        router.stop()
    assert sorted(trained(steps)) == list(range(3 * BATCH * NUM_SAMPLES))
    for step in steps:
        assert all(step["kept"])
        assert step["experts"] == [[length - 1, 2, 2] for length in step["lengths"]]
    asked = [r for r in engine.requests("/generate") if r.rid and "-m" in r.rid]
    assert len({r.body["sampling_params"]["sampling_seed"] for r in asked}) == NUM_SAMPLES


def test_save_and_resume_lose_nothing(tmp_path: Path, model: Path, engines: Any) -> None:
    made = engines(1, tokens_per_s=150.0)
    save = tmp_path / "checkpoint"
    save.mkdir()
    more = ["--partial-rollout", "--save", str(save), "--save-interval", "1"]
    first = Training(tmp_path, model, made, "--num-rollout", "5", *more).wait()
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    more += ["--num-rollout", "8", "--load", str(save)]
    second = Training(tmp_path, model, made, *more, FA_ROLLOUT_TEST_START="3").wait()
    everything = trained([step for step in first if step["step"] < 3], second)
    assert sorted(everything) == list(range(8 * BATCH * NUM_SAMPLES))


def test_fan_out_and_the_fast_conversion_go_through_slimes_own_steps(
    tmp_path: Path, model: Path, engines: Any
) -> None:
    made = engines(1)
    more = ["--custom-generate-function-path", "tests.slime.real.plugins.two_of_each"]
    more += ["--custom-convert-samples-to-train-data-path", "fa_rollout.convert_samples_to_train_data"]
    steps = Training(tmp_path, model, made, "--num-rollout", "3", "--partial-rollout", *more).wait()
    counts = {index: trained(steps).count(index) for index in trained(steps)}
    assert counts == dict.fromkeys(range(3 * BATCH * NUM_SAMPLES), 2)
    assert all(step["types"] == ["Tensor"] for step in steps), "trainers have ordinary tensors"


def test_options_of_a_file_arrays_and_dumps_go_through_slimes_own_steps(
    tmp_path: Path, model: Path, engines: Any
) -> None:
    made = engines(1)
    file = tmp_path / "options.yaml"
    own = f"fa_rollout_arrays: true\nfa_rollout_log_dir: {tmp_path / 'events'}\n"
    file.write_text(own + "custom_rm_path: null\nrm_type: random\n")
    dump = tmp_path / "dump"
    more = ["--custom-config-path", str(file), "--dump-details", str(dump)]
    steps = Training(tmp_path, model, made, "--num-rollout", "3", "--partial-rollout", *more).wait()
    assert (tmp_path / "events" / "events.jsonl").exists()
    code = (
        "import json, sys; from slime.observability.rollout_data_utils import load_debug_rollout_data\n"
        "read = [load_debug_rollout_data(sys.argv[1], rollout_id=step) for step in range(3)]\n"
        "print(json.dumps([[(s.index, len(s.tokens), type(s.tokens).__name__) for s in r] for r in read]))"
    )
    words = [PYTHON, "-c", code, str(dump / "rollout_data" / "{rollout_id}.pt")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    dumped = json.loads(done.stdout.splitlines()[-1])
    for step, samples in zip(steps, dumped, strict=True):
        lengths = dict(zip(step["indices"], step["lengths"], strict=True))
        assert {index: length for index, length, _ in samples} == lengths
        assert {kind for _, _, kind in samples} == {"ndarray"}


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
