"""The folder of a run's records: private, held by one run at a time, free again however that one ended."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fa_rollout.launcher.output import OutputFolder, OutputFolderError, holder_of
from fa_rollout.preflight import check_output

HOLD = """
import sys, time
from fa_rollout.launcher.output import OutputFolder
folder = OutputFolder.open(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_it_is_made_with_all_above_it_and_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with OutputFolder.open(str(tmp_path / "a" / "b")):
            assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_folder_that_is_there_keeps_its_mode_and_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "events.jsonl").write_text("{}\n")
    with OutputFolder.open(str(tmp_path)):
        assert (tmp_path / "events.jsonl").read_text() == "{}\n"
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_second_run_is_refused_while_the_first_lives_and_welcome_when_it_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == b"held\n"
            with pytest.raises(OutputFolderError, match=rf"in use by another run \(process {first.pid}\)"):
                OutputFolder.open(str(tmp_path))
            assert f"process {first.pid}" in check_output(str(tmp_path))[0].text
        finally:
            first.kill()
    assert check_output(str(tmp_path)) == []
    OutputFolder.open(str(tmp_path)).close()
    OutputFolder.open(str(tmp_path)).close()


def test_a_hub_that_closes_its_books_after_its_launchers_death_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = OutputFolder.open(str(tmp_path))
    (tmp_path / ".lock").write_text(f'{{"pid": 1, "host": "{os.uname().nodename}", "born_s": 0.0}}')
    assert holder_of(str(tmp_path)) is None
    monkeypatch.setattr("time.sleep", lambda seconds: inherited.close())
    OutputFolder.open(str(tmp_path)).close()


def test_no_records_need_no_folder() -> None:
    with OutputFolder.open(None) as none:
        assert none.lock_fds == ()


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with OutputFolder.open(str(tmp_path)) as folder:
        assert folder.lock_fd is None


def test_a_path_that_is_not_a_folder_is_refused_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFolderError, match=r"run.output_dir = .* must be a writable folder"):
        OutputFolder.open(str(tmp_path / "file" / "out"))
