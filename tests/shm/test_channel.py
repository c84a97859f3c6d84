"""The control channel between two ends of one process, and of two."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.channels.channel import Channel
from shm.errors import ChannelClosed, ChannelError, ChannelTimeout, MessageTooLarge


@contextlib.contextmanager
def pair(**options: int) -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with Channel(left, **options) as near, Channel(right, **options) as far:
        yield near, far


def test_messages_arrive_whole_and_in_order() -> None:
    with pair() as (left, right):
        payloads = [b"", b"x", os.urandom(100), os.urandom(3_000_000), b"end"]
        sender = threading.Thread(target=lambda: [left.send(payload) for payload in payloads])
        sender.start()
        assert [right.receive(10) for _ in payloads] == payloads
        sender.join()


def test_an_urgent_message_overtakes_those_that_wait_and_splits_none() -> None:
    with pair() as (left, right):
        for number in range(2000):
            left.queue(b"%06d" % number + bytes(1000))
        assert not left.flush()
        left.queue(b"stop", urgent=True)
        received = []
        while len(received) < 2001:
            left.flush()
            received += right.read_ready()
        assert received.index(b"stop") < 1000
        received.remove(b"stop")
        assert [int(payload[:6]) for payload in received] == list(range(2000))


def test_what_was_sent_before_the_end_is_delivered_before_it() -> None:
    with pair() as (left, right):
        left.send(b"last words")
        left.close()
        assert right.receive(1) == b"last words"
        for _ in range(2):
            with pytest.raises(ChannelClosed, match="closed the connection"):
                right.receive(1)
        with pytest.raises(ChannelClosed):
            right.send(b"too late")


def test_a_wait_has_a_deadline() -> None:
    with pair() as (left, right):
        with pytest.raises(ChannelTimeout, match="a message"):
            left.receive(0.01)
        with pytest.raises(ChannelTimeout, match="to read"):
            left.send(bytes(10_000_000), timeout_s=0.01)
        assert right.read_ready() == []


def test_a_message_beyond_the_limit_is_refused_at_both_ends() -> None:
    with pair(max_message_bytes=1000) as (left, right):
        with pytest.raises(MessageTooLarge, match="1,001"):
            left.queue(bytes(1001))
        left._sock.send(b"FaC1" + (1001).to_bytes(4, "little"))
        with pytest.raises(MessageTooLarge, match="announces"):
            right.receive(1)


def test_bytes_of_another_protocol_end_the_conversation_at_once() -> None:
    with pair() as (left, right):
        left.send(b"good")
        left._sock.send(b"\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00")
        assert right.receive(1) == b"good"
        with pytest.raises(ChannelError, match="no part of fa_rollout"):
            right.receive(1)


def test_descriptors_come_with_the_first_message_where_they_are_expected() -> None:
    with pair(max_fds=2) as (left, right):
        read_end, write_end = os.pipe()
        left.send(b"welcome", fds=[read_end])
        os.close(read_end)
        assert right.receive(1) == b"welcome"
        (fd,) = right.take_fds()
        assert not os.get_inheritable(fd)
        os.write(write_end, b"through")
        assert os.read(fd, 10) == b"through"
        os.close(fd)
        os.close(write_end)


_PEER = """
import os, signal, socket, sys, time
from shm.channels.channel import Channel
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
"""


@contextlib.contextmanager
def peer(
    code: str, *, watched: bool = True, **options: int
) -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    """A channel to a process that runs some code with its own end as `channel`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PEER + textwrap.dedent(code), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
            **options,
        )
    with Channel(ours, peer_pid=process.pid if watched else None) as channel:
        yield channel, process
    assert process.wait(30) in (0, -signal.SIGKILL)


def test_ten_thousand_unread_messages_each_way_block_nobody() -> None:
    code = """
        for number in range(10_000):
            channel.send(b"%06d" % number + bytes(1018))
        time.sleep(0.5)
        assert [int(channel.receive(30)[:6]) for _ in range(10_000)] == list(range(10_000))
        channel.send(b"all there")
        channel.receive(30)
    """
    with peer(code) as (channel, _):
        for number in range(10_000):
            channel.send(b"%06d" % number + bytes(1018))
        assert [int(channel.receive(30)[:6]) for _ in range(10_000)] == list(range(10_000))
        assert channel.receive(30) == b"all there"
        channel.send(b"bye")


def test_a_stop_overtakes_ten_thousand_messages_that_nobody_reads() -> None:
    code = """
        time.sleep(0.5)
        position = 0
        while channel.receive(30) != b"stop":
            position += 1
        assert position < 1000, position
        channel.send(b"stopped")
    """
    with peer(code) as (channel, _):
        for number in range(10_000):
            channel.queue(b"%06d" % number + bytes(1018))
        assert not channel.flush()
        channel.queue(b"stop", urgent=True)
        assert channel.receive(30) == b"stopped"


def test_death_is_seen_at_once_though_a_forked_child_holds_the_socket() -> None:
    code = """
        copy = os.dup(channel.fileno())
        channel.send(b"last words")
        if os.fork() == 0:
            time.sleep(60)      # holds the copy; ended by the test
        print(open("/proc/self/task/%d/children" % os.getpid()).read(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with peer(code, stdout=subprocess.PIPE) as (channel, process):
        assert channel.receive(10) == b"last words"
        with pytest.raises(ChannelClosed, match="has ended"):
            channel.receive(10)
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        process.stdout.close()


def test_a_forked_child_can_neither_speak_nor_hold_the_line() -> None:
    code = """
        from shm.errors import ChannelClosed
        if os.fork() == 0:
            for act in (lambda: channel.send(b"not mine"), lambda: channel.receive(1), channel.read_ready):
                try:
                    act()
                except ChannelClosed:
                    continue
                os._exit(1)
            time.sleep(0.5)
            os._exit(0)
        channel.send(b"mine")
        channel.close()
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    """
    with peer(code, watched=False) as (channel, _):
        assert channel.receive(10) == b"mine"
        with pytest.raises(ChannelClosed, match="closed the connection"):
            channel.receive(10)


def test_descriptors_lost_to_the_limit_of_open_files_are_missed_loudly() -> None:
    code = """
        import resource
        from shm.errors import ChannelError
        other = Channel(socket.socket(fileno=os.dup(channel.fileno())), max_fds=1)
        os.close(first_free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, 100))
        try:
            other.receive(10)
        except ChannelError as error:
            channel.send(str(error).encode())
    """
    with peer(code) as (channel, _):
        channel.send(b"welcome", fds=[0])
        assert b"ulimit -n" in channel.receive(10)


def test_descriptors_from_a_stranger_are_dropped() -> None:
    with pair() as (left, right):
        before = os.listdir("/proc/self/fd")
        left.send(b"hello", fds=[0, 0, 0])
        assert right.receive(1) == b"hello"
        assert right.take_fds() == []
        assert os.listdir("/proc/self/fd") == before


def test_a_truncated_message_is_no_message() -> None:
    with pair() as (left, right):
        left._sock.send(b"FaC1" + (100).to_bytes(4, "little") + b"half")
        left.close()
        with pytest.raises(ChannelClosed, match="in the middle of a message"):
            right.receive(1)


def test_figures_count_what_went_through() -> None:
    with pair() as (left, right):
        for _ in range(5):
            left.send(b"12345")
        right.receive(1)
        sent, received = left.statistics(), right.statistics()
        assert (sent.num_sent, sent.sent_bytes, sent.num_queued) == (5, 5 * 13, 0)
        assert (received.num_received, received.received_bytes) == (5, 5 * 13)


def test_descriptors_that_cannot_be_passed_are_refused_before_anything_is_sent() -> None:
    with pair() as (left, right):
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ChannelError, match="must be open"):
            left.send(b"welcome", fds=[0, 9999])
        assert os.listdir("/proc/self/fd") == before
        assert right.read_ready() == []
        left.send(b"still in order")
        assert right.receive(1) == b"still in order"
