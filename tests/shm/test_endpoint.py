"""Where channels begin: only this user's processes, however careless the machine around them."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.channels.channel import Channel
from shm.channels.endpoint import Listener, connect, listen
from shm.errors import AttachTimeout, ChannelError, HandshakeRefused
from shm.ring.segment import Segment

_ROOT = Path(__file__).parents[2]


def accept(listener: Listener) -> Channel:
    """The next peer, waited for."""
    deadline_s = time.monotonic() + 10
    while True:
        try:
            return listener.accept()
        except BlockingIOError:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)


def soon() -> float:
    return time.monotonic() + 10


def run(code: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_segment_crosses_with_the_welcome(tmp_path: Path) -> None:
    with listen(tmp_path / "run") as listener, Segment.create(1 << 16) as segment:
        segment.array[:] = 9
        code = """
            import sys, time
            from shm.channels.endpoint import connect
            from shm.ring.segment import Segment
            channel = connect(sys.argv[1], time.monotonic() + 10)
            channel.send(b"hello")
            assert channel.receive(10) == b"welcome"
            (fd,) = channel.take_fds()
            print(int(Segment.attach(fd, writable=False).array.sum()))
        """
        answers: list[subprocess.CompletedProcess[str]] = []
        thread = threading.Thread(target=lambda: answers.append(run(code, listener.address)))
        thread.start()
        with accept(listener) as channel:
            assert channel.receive(10) == b"hello"
            assert channel.peer_uid == os.geteuid()
            channel.send(b"welcome", fds=[segment.fd])
            thread.join()
        assert answers[0].stdout.strip() == str(9 << 16), answers[0].stderr


def test_folder_and_socket_are_private_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with listen(tmp_path / "deep" / "run") as listener:
            address = Path(listener.address)
            assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(address.stat().st_mode) == 0o600
            assert len(bytes.fromhex(address.stem)) * 8 >= 64
    finally:
        os.umask(umask)


def test_a_folder_that_others_reach_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ChannelError, match="0700"):
        listen(tmp_path)


def test_a_path_beyond_the_limit_of_socket_addresses_works(tmp_path: Path) -> None:
    with listen(tmp_path / ("long" * 50)) as listener:
        assert len(listener.address) > 200
        with connect(listener.address, soon()) as near, accept(listener) as far:
            near.send(b"through")
            assert far.receive(10) == b"through"


def test_closing_removes_only_what_the_listener_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, second = listen(folder), listen(folder)
    first.close()
    first.close()
    assert os.listdir(folder) == [Path(second.address).name]
    os.rename(second.address, folder / "moved")
    Path(second.address).touch()
    second.close()
    assert Path(second.address).exists()


def test_attaching_early_waits_for_the_listener(tmp_path: Path) -> None:
    """A path that nobody listens on yet, then somebody does."""
    late = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = str(tmp_path / "late.sock")

    def start() -> None:
        time.sleep(0.1)
        late.bind(path)
        time.sleep(0.1)
        late.listen()

    thread = threading.Thread(target=start)
    thread.start()
    connect(path, soon()).close()
    thread.join()
    late.close()


def test_the_deadline_of_attaching_says_how_far_it_came(tmp_path: Path) -> None:
    path = str(tmp_path / "hub.sock")
    with pytest.raises(AttachTimeout, match="no such socket"):
        connect(path, time.monotonic())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(path)
        with pytest.raises(AttachTimeout, match="nobody listens"):
            connect(path, time.monotonic() + 0.05)
        sock.listen(0)
        with connect(path, soon()), pytest.raises(AttachTimeout, match="does not take connections in"):
            connect(path, time.monotonic() + 0.05)
    with pytest.raises(ChannelError, match="must be reachable"):
        connect("/dev/null/x", time.monotonic())


def test_a_listener_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    for removed in (tmp_path / "gone" / "hub.sock", tmp_path / "hub.sock"):
        with pytest.raises(AttachTimeout, match="folder was removed"):
            connect(removed, time.monotonic() + 60)
    path = tmp_path / "hub.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
    with pytest.raises(AttachTimeout, match="its process has ended"):
        connect(path, time.monotonic() + 60)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user reaches and writes."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away_at_every_door(open_folder: Path) -> None:
    code = """
        import os, socket, sys
        os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        try:
            sock.connect(sys.argv[1])
            print("connected", sock.recv(1))
        except PermissionError:
            print("denied")
    """
    with listen(open_folder / "run") as listener:
        assert run(code, listener.address).stdout == "denied\n"
        os.chmod(Path(listener.address).parent, 0o711)  # as if a careless hand had opened it
        assert run(code, listener.address).stdout == "denied\n"
        os.chmod(listener.address, 0o666)
        answers: list[subprocess.CompletedProcess[str]] = []
        thread = threading.Thread(target=lambda: answers.append(run(code, listener.address)))
        thread.start()
        with pytest.raises(HandshakeRefused, match="65534"):
            accept(listener)
        thread.join()
        assert answers[0].stdout == "connected b''\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_listener_of_another_user_is_not_trusted(open_folder: Path) -> None:
    code = """
        import os, socket, sys
        os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(sys.argv[1])
        sock.listen()
        sock.accept()
    """
    path = str(open_folder / "trap.sock")
    thread = threading.Thread(target=run, args=(code, path))
    thread.start()
    with pytest.raises(HandshakeRefused, match="65534"):
        connect(path, soon())
    thread.join()


def _unshare_works() -> bool:
    return subprocess.run(["unshare", "-p", "-f", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _unshare_works(), reason="pid namespaces cannot be made here")
def test_a_peer_in_another_pid_namespace_is_served(tmp_path: Path) -> None:
    code = """
        import sys, time
        from shm.channels.endpoint import connect
        from shm.errors import ChannelClosed
        channel = connect(sys.argv[1], time.monotonic() + 10)
        channel.send(b"hello")
        assert channel.receive(10) == b"welcome"
        try:
            channel.receive(10)
        except ChannelClosed:
            print("saw the end")
    """
    with listen(tmp_path / "run") as listener:
        answers: list[subprocess.CompletedProcess[str]] = []
        wrapper = ("unshare", "-p", "-f")
        thread = threading.Thread(target=lambda: answers.append(run(code, listener.address, wrapper=wrapper)))
        thread.start()
        with accept(listener) as channel:
            assert channel.receive(10) == b"hello"
            channel.send(b"welcome")
        thread.join()
        assert answers[0].stdout.strip() == "saw the end", answers[0].stderr


def test_attaching_and_leaving_costs_nothing_that_stays(tmp_path: Path) -> None:
    _attach_and_leave(tmp_path, rounds=300)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_attaching_and_leaving_a_hundred_thousand_times_costs_nothing_that_stays(tmp_path: Path) -> None:
    _attach_and_leave(tmp_path, rounds=100_000)


def _attach_and_leave(folder: Path, rounds: int) -> None:
    with listen(folder / "run") as listener, Segment.create(1 << 20) as segment:

        def once() -> None:
            with connect(listener.address, soon()) as near, accept(listener) as far:
                far.send(b"welcome", fds=[segment.fd])
                assert near.receive(10) == b"welcome"
                attached = Segment.attach(near.take_fds()[0], writable=False)
                assert not attached.array[:100].any()
                attached.close()

        for _ in range(50):
            once()
        before = _footprint()
        for _ in range(rounds):
            once()
        after = _footprint()
    assert after[:2] == before[:2]
    assert after[2] < before[2] + (4 << 20)


def _footprint() -> tuple[int, int, int]:
    """(descriptors, maps, resident bytes)"""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "fa_rollout" in line]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), len(shared), resident
