"""The run directory: private, unguessable, gone with its run, and nobody else's touched."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fa_rollout.launcher.rundir import RunDirectory, RunDirectoryError

HOLD = """
import sys, time
from pathlib import Path
from fa_rollout.launcher.rundir import RunDirectory
directory = RunDirectory.create(Path(sys.argv[1]))
print(directory.path, flush=True)
time.sleep(60)
"""


def hold(base: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A live run of another process; the path of its folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(base)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    process.stdout.close()
    return process, path


def test_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RunDirectory.create(tmp_path) as directory:
            assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
            assert stat.S_IMODE((directory.path / "lock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_names_differ_and_the_folder_goes_with_the_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as one, RunDirectory.create(tmp_path) as other:
        assert one.path != other.path
        (one.path / "weights").mkdir()
        (one.path / "weights" / "model.safetensors").write_bytes(b"x" * 100)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_runs_folder_is_swept_by_the_next_start(tmp_path: Path) -> None:
    process, path = hold(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    assert path.is_dir()
    with RunDirectory.create(tmp_path) as directory:
        assert [entry.name for entry in tmp_path.iterdir()] == [directory.path.name]


def test_a_live_runs_folder_is_left_alone_however_old_it_looks(tmp_path: Path) -> None:
    process, path = hold(tmp_path)
    try:
        two_days_ago = path.stat().st_mtime - 2 * 86_400
        os.utime(path, (two_days_ago, two_days_ago))
        RunDirectory.create(tmp_path).close()
        assert (path / "lock").is_file()
    finally:
        process.kill()
        process.wait(timeout=10)


def test_a_child_that_inherited_the_lock_keeps_the_folder(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path)
    child = subprocess.Popen(["sleep", "60"], pass_fds=(directory.lock_fd,))
    try:
        os.close(directory.lock_fd)
        RunDirectory.create(tmp_path).close()
        assert directory.path.is_dir()
    finally:
        child.kill()
        child.wait(timeout=10)
    RunDirectory.create(tmp_path).close()
    assert not directory.path.exists()


def test_what_is_not_provably_ours_is_untouched(tmp_path: Path) -> None:
    name = "fa_rollout-" + "0" * 32
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    open_to_all = tmp_path / ("fa_rollout-" + "1" * 32)
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    similar = tmp_path / "fa_rollout-mine"
    similar.mkdir(mode=0o700)
    RunDirectory.create(tmp_path).close()
    assert (tmp_path / "elsewhere" / "lock").is_file()
    assert open_to_all.is_dir()
    assert similar.is_dir()


def test_a_foreign_users_folder_is_untouched(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    foreign = tmp_path / ("fa_rollout-" + "2" * 32)
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 4242, 4242)
    RunDirectory.create(tmp_path).close()
    assert foreign.is_dir()


def test_a_folder_whose_owner_died_before_locking_it_goes(tmp_path: Path) -> None:
    (tmp_path / ("fa_rollout-" + "3" * 32)).mkdir(mode=0o700)
    with RunDirectory.create(tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory.path]


def test_no_place_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="TMPDIR"):
        RunDirectory.create(tmp_path / "deep" / "er")


def test_a_private_xdg_runtime_dir_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Path("/tmp") / f"rt-{os.getpid()}"
    runtime.mkdir(mode=0o700)
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        with RunDirectory.create() as directory:
            assert directory.path.parent == runtime
        runtime.chmod(0o755)
        with RunDirectory.create() as directory:
            assert directory.path.parent != runtime
    finally:
        runtime.rmdir()


def test_many_starts_at_once_never_take_each_others_folder(tmp_path: Path) -> None:
    script = HOLD.replace(
        "time.sleep(60)",
        "time.sleep(0.5); assert (directory.path / 'lock').exists(); directory.close()",
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(6)]
    assert [run.wait(timeout=60) for run in runs] == [0] * 6
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_held_for_the_runs_life(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        fd = os.open(directory.path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
