"""Engines that a run launches, that join it and that leave it: by the real commands, to the last prompt."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.config import to_toml
from fa_rollout.demo.sglang import CPU_SETTINGS, cpu_environment, interpreter
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.hub.rig import words
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from tests.launcher.processes import Launch

pytestmark = pytest.mark.slow

NUM_STEPS, GROUPS_PER_STEP, SAMPLES_PER_GROUP = 16, 4, 2
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
SCRIPT = Script(vocab_size=3 + len(CHARACTERS), lengths=Lengths(tokens=40), tokens_per_s=200.0)


class Run(Launch):
    """A run with the plain trainer."""

    def __init__(self, folder: Path, sections: dict[str, dict[str, Any]]) -> None:
        write_tiny_model(folder / "model", characters=CHARACTERS)
        rows = (json.dumps({"prompt": f"prompt {row}", "label": str(row)}) for row in range(40))
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        tree: dict[str, dict[str, Any]] = {
            "data": {"path": str(folder / "prompts.jsonl")},
            "rollout": {
                "num_steps": NUM_STEPS,
                "groups_per_step": GROUPS_PER_STEP,
                "samples_per_group": SAMPLES_PER_GROUP,
                "staleness": 2,
            },
            "sampling": {"max_new_tokens": 64},
            "reward": {"function": "tests.chaos.user_code:reward", "in_loop": True},
            "ring": {"bytes": "1MiB"},
            "run": {"output_dir": str(folder)},
        } | sections
        (folder / "run.toml").write_text(to_toml(tree))
        super().__init__(folder, sys.executable, "-m", "tests.end_to_end.plain_trainer", str(folder))

    @property
    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "steps.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def reached(self, step: int, timeout_s: float = 60) -> None:
        self.until(lambda: len(self.steps) >= step, timeout_s)

    def hold(self, *, is_held: bool = True) -> None:
        """No step ends while this is so."""
        if is_held:
            (self.folder / "hold").touch()
        else:
            (self.folder / "hold").unlink()

    def engines(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`fa-rollout-proc engines`, as in another terminal of the same user."""
        return subprocess.run(
            [sys.executable, "-m", "fa_rollout.cli", "engines", *words, "--run", str(self.folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def assert_complete(self) -> None:
        """Every step trained, every sample once, the books whole."""
        assert self.end(timeout_s=90) == 0, self.stderr
        assert [step["step"] for step in self.steps] == list(range(NUM_STEPS))
        samples = [tuple(sample) for step in self.steps for sample in step["samples"]]
        assert len(samples) == len(set(samples)) == NUM_STEPS * GROUPS_PER_STEP * SAMPLES_PER_GROUP
        assert max(step["staleness"] for step in self.steps) <= 2
        last = json.loads((self.folder / "events.jsonl").read_text().splitlines()[-1])
        counts = last["counts"]
        assert counts["failed"] == counts["dropped"] == 0
        assert counts["taken"] == counts["trained"] + counts["returned"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**sections: dict[str, Any]) -> Run:
        runs.append(Run(tmp_path, sections))
        return runs[-1]

    yield start
    for run in runs:
        run.destroy()


def test_engines_join_and_leave_a_run_by_command(start: Callable[..., Run], tmp_path: Path) -> None:
    with ScriptedEngine.start(SCRIPT) as first, ScriptedEngine.start(SCRIPT) as second:
        run = start(engine={"urls": [first.url], "tokenizer": str(tmp_path / "model")})
        run.reached(3)
        run.hold()  # a command takes as long as many steps
        added = run.engines("add", second.url)
        assert added.returncode == 0, added.stderr
        assert f"engines: {first.url}, {second.url}" in added.stdout
        loads = [one.time_s for one in second.requests("/update_weights_from_disk")]
        run.hold(is_held=False)
        run.until(lambda: len(second.requests("/generate")) > 4)
        run.hold()
        samples = [one for one in second.requests("/generate") if "probe" not in (one.rid or "")]
        assert loads[0] < samples[0].time_s
        assert second.url in run.engines("list").stdout

        removed = run.engines("remove", first.url)
        assert removed.returncode == 0, removed.stderr
        assert first.state()["num_running"] == 0
        refused = run.engines("remove", second.url)
        assert refused.returncode == 2
        assert "is the last engine of the run" in refused.stderr
        first.stop()
        run.hold(is_held=False)
        run.assert_complete()


def test_a_generator_that_takes_over_knows_who_joined(start: Callable[..., Run], tmp_path: Path) -> None:
    with ScriptedEngine.start(SCRIPT) as first, ScriptedEngine.start(SCRIPT) as second:
        run = start(engine={"urls": [first.url], "tokenizer": str(tmp_path / "model")})
        run.reached(2)
        run.hold()
        assert run.engines("add", second.url).returncode == 0
        assert run.engines("remove", first.url, "--drain", "0").returncode == 0
        first.stop()
        run.child("fa_rollout.generator").kill()
        run.hold(is_held=False)
        run.assert_complete()


def test_launched_engines_serve_a_run_and_one_that_dies_for_good_is_done_without(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    script = {"vocab_size": SCRIPT.vocab_size, "tokens_per_s": 200.0, "lengths": {"tokens": 40}}
    body = json.dumps(script)[:-1] + ', "port": {port}}'
    command = [sys.executable, "-m", "tests.kit.scripted", "--config", body]
    run = start(
        engine={"tokenizer": str(tmp_path / "model")},
        launch={"server": "sglang", "command": command, "number": 2, "max_restarts": 0},
    )
    run.reached(3)
    run.look()
    servers = [p for p in run.seen.values() if "tests.kit.scripted" in words(p)]
    servers = [p for p in servers if "fa_rollout.engines.supervisor" not in words(p)]
    assert len(servers) == 2
    servers[0].kill()
    run.assert_complete()
    told = [line for line in run.stderr.splitlines() if line.startswith("fa-rollout-proc: engine ")]
    assert len(told) == 1
    assert "exited with code" in told[0]


def test_a_launched_engine_that_has_died_is_told_though_nobody_asks_it_anything(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(engine={"model": str(tmp_path / "model")}, launch={"number": 2})
    run.reached(1)
    run.hold()
    run.until(lambda: run.engines("list").stdout.count("  0/") == 2)
    run.look()
    engines = [
        p for p in run.seen.values() if p.is_running() and "fa_rollout.engines.embedded" in p.cmdline()
    ]
    for engine in engines:
        engine.kill()
    run.until(lambda: run.engines("list").stdout.count("  out  ") == 2)
    run.until(lambda: run.engines("list").stdout.count("  ok  ") == 2)
    run.hold(is_held=False)
    run.assert_complete()
    events = (tmp_path / "events.jsonl").read_text()
    assert events.count("exited with code") == 2


def test_several_embedded_engines_serve_a_run(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(engine={"model": str(tmp_path / "model")}, launch={"number": 2})
    run.reached(1)
    run.hold()
    run.until(lambda: run.engines("list").stdout.count("ok") == 2)
    run.hold(is_held=False)
    run.assert_complete()


@pytest.mark.sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("router", [False, True], ids=["direct", "router"])
def test_a_launched_sglang_that_dies_comes_back_and_serves_again(
    start: Callable[..., Run], tmp_path: Path, router: bool
) -> None:
    run = start(
        engine={"model": str(tmp_path / "model"), "router": router},
        launch={
            "server": "sglang",
            "python": interpreter(),
            "number": 2,
            "arguments": [*CPU_SETTINGS],
            "environment": cpu_environment(threads=1),
        },
    )
    run.reached(3, timeout_s=240)
    servers = [p for p in run.seen.values() if "sglang.launch_server" in words(p)]
    servers = [p for p in servers if "fa_rollout.engines.supervisor" not in words(p)]
    assert len(servers) == 2
    servers[0].kill()
    run.hold()
    run.until(lambda: "weights_renewed" in run.stderr, timeout_s=240)
    run.hold(is_held=False)
    run.assert_complete()
    lives = [log.read_text().split("server is fired up") for log in sorted(tmp_path.glob("engine-?.log"))]
    assert sorted(map(len, lives)) == [2, 3], "one of two was started again"
    assert "POST /generate" in max(lives, key=len)[-1]
