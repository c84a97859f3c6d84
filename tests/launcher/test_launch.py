"""A run's processes: codes, signals and deaths, each through the real command with the real hub.

Their engine is a scripted one; nobody trains what it makes.
"""

import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.scripted import ScriptedEngine
from tests.launcher.processes import Launch, serve, write_run

# Tells that it runs, then waits; `hold` ignores SIGTERM.
PATIENT = "touch $OUT/up; exec sleep 60"
STUBBORN = "trap '' TERM; touch $OUT/up; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine.start() as engine:
        yield engine


@pytest.fixture
def start(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(*command: str) -> Launch:
        launches.append(Launch(tmp_path, *command))
        return launches[-1]

    serve(tmp_path, engine)
    write_run(tmp_path)
    yield start
    for launch in launches:
        launch.destroy()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_trainers_code_is_the_runs(start: Callable[..., Launch], script: str, code: int) -> None:
    assert start("sh", "-c", script).end() == code


def test_the_trainer_finds_a_private_socket_by_its_environment(start: Callable[..., Launch]) -> None:
    script = 'echo "$FA_ROLLOUT_ADDRESS $FA_ROLLOUT_RUN $FA_ROLLOUT_TOKEN"; exec sleep 60'
    launch = start("sh", "-c", script)
    launch.until(lambda: launch.stdout.endswith("\n"))
    address, run, token = launch.stdout.split()
    assert stat.S_ISSOCK(Path(address).stat().st_mode)
    assert stat.S_IMODE(Path(address).parent.stat().st_mode) == 0o700
    assert Path(address).parent.parent == launch.base
    assert len(run) >= 16
    assert len(token) == 64
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == 130


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
    ],
)
def test_one_signal_is_enough(start: Callable[..., Launch], signum: int, code: int) -> None:
    launch = start("sh", "-c", PATIENT).up()
    launch.process.send_signal(signum)
    assert launch.end(timeout_s=10) == code
    assert "Traceback" not in launch.stderr


def test_slurms_notice_to_every_process_is_an_order_to_the_launcher_alone(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    saves = "trap 'echo saved > $OUT/saved; exit 0' TERM; touch $OUT/up; while :; do sleep 0.1; done"
    launch = start("sh", "-c", saves).up()
    for process in launch.seen.values():
        process.send_signal(signal.SIGUSR1)
    launch.process.send_signal(signal.SIGUSR1)
    assert launch.end(timeout_s=10) == 138
    assert (tmp_path / "saved").exists()


def test_sigquit_ends_it_at_once_and_leaves_nothing(start: Callable[..., Launch], tmp_path: Path) -> None:
    write_run(tmp_path, run={"grace_s": 600})
    launch = start("sh", "-c", STUBBORN).up()
    launch.process.send_signal(signal.SIGQUIT)
    assert launch.end(timeout_s=10) == 131


def test_an_interrupt_of_the_whole_group_is_one_interrupt(start: Callable[..., Launch]) -> None:
    launch = start("sh", "-c", PATIENT).up()
    os.killpg(launch.process.pid, signal.SIGINT)
    assert launch.end(timeout_s=10) == 130
    assert "Traceback" not in launch.stderr


def test_an_interrupt_during_the_start_leaves_nothing(start: Callable[..., Launch]) -> None:
    launch = start("sh", "-c", PATIENT)
    launch.until(lambda: list(launch.base.glob("fa_rollout-*")))
    launch.process.send_signal(signal.SIGINT)
    assert launch.end(timeout_s=10) == 130


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace(start: Callable[..., Launch]) -> None:
    launch = start("sh", "-c", STUBBORN).up()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end(timeout_s=10) == 143


def test_a_second_signal_ends_it_at_once(start: Callable[..., Launch], tmp_path: Path) -> None:
    write_run(tmp_path, run={"grace_s": 600})
    launch = start("sh", "-c", STUBBORN).up()
    launch.process.send_signal(signal.SIGINT)
    launch.until(lambda: "SIGINT" in launch.stderr)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end(timeout_s=10) == 130


def test_a_killed_hub_ends_the_trainer_with_one_clear_message(start: Callable[..., Launch]) -> None:
    launch = start("sh", "-c", PATIENT).up()
    launch.child("fa_rollout.hub").kill()
    assert launch.end(timeout_s=5) == 70
    assert launch.stderr.count("the hub died") == 1
    assert "Traceback" not in launch.stderr


def test_a_hub_that_stands_still_is_noticed_and_ended(start: Callable[..., Launch], tmp_path: Path) -> None:
    write_run(tmp_path, run={"heartbeat_s": 1})
    launch = start("sh", "-c", PATIENT).up()
    launch.child("fa_rollout.hub").suspend()
    assert launch.end() == 70
    assert launch.stderr.count("the hub did not answer for 1 s (run.heartbeat_s) and was killed") == 1


def test_a_killed_launcher_takes_hub_and_generator_along(start: Callable[..., Launch]) -> None:
    launch = start("sh", "-c", PATIENT).up()
    trainer = launch.child("sleep")
    launch.process.kill()
    launch.process.wait()
    launch.seen.pop(trainer.pid)
    launch.all_gone()
    trainer.kill()


def test_ranks_of_a_killed_agent_go_with_the_run(start: Callable[..., Launch], tmp_path: Path) -> None:
    agent = "import subprocess, time, pathlib\n"
    agent += "subprocess.Popen(['sleep', '61'], start_new_session=True)\n"
    agent += f"pathlib.Path({str(tmp_path)!r}, 'up').touch(); time.sleep(60)"
    launch = start(sys.executable, "-c", agent).up()
    launch.child("61")
    launch.child(agent).kill()
    assert launch.end(timeout_s=10) == 137


def test_standalone_tells_what_a_trainer_needs_and_waits(start: Callable[..., Launch]) -> None:
    launch = start()
    launch.until(lambda: "Ctrl-C" in launch.stdout)
    for name in ("ADDRESS", "RUN", "TOKEN"):
        assert f"export FA_ROLLOUT_{name}=" in launch.stdout
    launch.process.send_signal(signal.SIGINT)
    assert launch.end(timeout_s=10) == 130


def test_a_run_outlives_a_full_disk_under_its_output(tmp_path: Path, engine: ScriptedEngine) -> None:
    serve(tmp_path, engine)
    write_run(tmp_path, trainer={"progress_s": 0.2})
    script = "import sys; [print(i, flush=True, file=f) for i in range(9) for f in (sys.stdout, sys.stderr)]"
    launch = Launch(tmp_path, sys.executable, "-c", f"{script}; sys.exit(7)", output=Path("/dev/full"))
    try:
        assert launch.process.wait(timeout=60) == 7
    finally:
        launch.destroy()


def test_what_a_trainer_writes_arrives_whole_and_before_the_last_word(start: Callable[..., Launch]) -> None:
    launch = start("sh", "-c", "for i in 1 2 3; do echo out$i; echo err$i >&2; done; exit 5")
    assert launch.end() == 5
    assert launch.stdout == "out1\nout2\nout3\n"
    assert launch.stderr.index("err3") < launch.stderr.index("the trainer exited with code 5")


def test_two_runs_at_once_have_nothing_in_common(start: Callable[..., Launch], tmp_path: Path) -> None:
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    shutil.copy(tmp_path / "run.toml", other_folder)
    one, other = start(), Launch(other_folder)
    try:
        for launch in (one, other):
            launch.until(lambda: "Ctrl-C" in launch.stdout)  # noqa: B023
        values = [re.findall(r"FA_ROLLOUT_\w+=(\S+)", launch.stdout) for launch in (one, other)]
        assert len(values[0]) == len(values[1]) == 3
        assert not set(values[0]) & set(values[1])
    finally:
        for launch in (one, other):
            launch.process.send_signal(signal.SIGINT)
    assert one.end(timeout_s=10) == other.end(timeout_s=10) == 130


def test_the_folder_of_records_is_made_whoever_starts_the_engines(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    write_run(tmp_path, run={"output_dir": str(tmp_path / "new" / "out")})
    launch = start("sh", "-c", PATIENT).up()
    assert stat.S_IMODE((tmp_path / "new" / "out").stat().st_mode) == 0o700
    assert (tmp_path / "new" / "out" / "events.jsonl").exists()
    second = start("sh", "-c", "exit 0")
    assert second.process.wait(timeout=30) == 2
    assert f"is in use by another run (process {launch.process.pid})" in second.stderr
    launch.process.kill()
    launch.process.wait()
    third = start("sh", "-c", "exit 0")
    assert third.end() == 0


def test_engines_that_are_down_are_said_and_end_the_start_before_the_trainer(tmp_path: Path) -> None:
    write_run(tmp_path, engine={"start_limit_s": 2}, trainer={"progress_s": 0.5})
    launch = Launch(tmp_path, "sh", "-c", "touch $OUT/up")
    try:
        assert launch.end() == 2
        assert "waiting for the engines: http://127.0.0.1:9 does not answer" in launch.stderr
        assert "not all engines are up; http://127.0.0.1:9" in launch.stderr
        assert "Traceback" not in launch.stderr
        assert not (tmp_path / "up").exists()
    finally:
        launch.destroy()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"reward": {"function": "broken_reward:reward"}},
            "importing broken_reward failed: ZeroDivisionError",
        ),
        ({"rollout": {"generate": "broken_reward:nothing"}}, "rollout.generate"),
        ({"data": {"prompt_key": "question"}}, "bad row at"),
    ],
)
def test_what_the_generator_finds_at_its_start_is_one_line_and_code_two(
    start: Callable[..., Launch],
    tmp_path: Path,
    changes: dict[str, dict[str, str]],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    write_run(tmp_path, **changes)
    launch = start("sh", "-c", "touch $OUT/up")
    assert launch.end() == 2
    assert not (tmp_path / "up").exists()
    lines = [line for line in launch.stderr.splitlines() if line.startswith("fa-rollout-proc:")]
    assert says in lines[-1]
    assert "Traceback" not in launch.stderr


def test_a_trainer_may_write_and_save_after_its_launcher_was_killed(
    start: Callable[..., Launch], tmp_path: Path
) -> None:
    waits = "while kill -0 $PPID; do sleep 0.1; done 2>/dev/null"
    script = f"touch $OUT/up; {waits}; echo bye && echo bye >&2 && touch $OUT/saved"
    launch = start("sh", "-c", script).up()
    launch.process.kill()
    launch.process.wait()
    deadline_s = time.monotonic() + 20.0
    while not (tmp_path / "saved").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    launch.all_gone()
