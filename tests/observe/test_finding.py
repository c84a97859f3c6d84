"""How a run is found from another terminal, and that its metrics process comes and goes with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.scripted import ScriptedEngine
from tests.launcher.processes import Launch, serve, write_run
from tests.observe.test_exporter import free_port, scrape


@pytest.fixture
def launch(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Launch]:
    """A run that nobody trains."""
    (tmp_path / "out").mkdir()
    port = free_port()
    (tmp_path / "port").write_text(str(port))
    serve(tmp_path, engine)
    write_run(
        tmp_path,
        metrics={"interval_s": 0.2, "prometheus_port": port},
        run={"output_dir": str(tmp_path / "out")},
    )
    launch = Launch(tmp_path, "sh", "-c", "touch $OUT/up; exec sleep 60").up()
    yield launch
    launch.destroy()


def top(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as in another terminal: with another temporary folder, without the run's environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FA_ROLLOUT_")}
    return subprocess.run(
        [sys.executable, "-m", "fa_rollout.cli", "top", "--once", *words],
        env=environment | {"TMPDIR": "/tmp", "XDG_RUNTIME_DIR": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_run_is_found_by_its_folder_its_process_and_its_name(launch: Launch) -> None:
    by_folder = top(str(launch.folder / "out"))
    assert by_folder.returncode == 0, by_folder.stderr
    name = by_folder.stdout.split()[1]
    for word in (str(launch.process.pid), name):
        found = top(word)
        assert found.returncode == 0, found.stderr
        assert found.stdout.split()[1] == name


def test_the_metrics_process_comes_and_goes_with_the_run(launch: Launch) -> None:
    port = int((launch.folder / "port").read_text())
    launch.until(lambda: scrape(port).get("fa_rollout_up_seconds", 0.0) > 0)
    launch.child("fa_rollout.observe.exporter").kill()
    launch.until(lambda: "the metrics process exited with code 137; restart 1" in launch.stderr)
    launch.until(lambda: scrape(port))
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end(timeout_s=20) == 143
    assert not scrape(port)
    assert '"event":"snapshot"' in (launch.folder / "out" / "metrics.jsonl").read_text()
