"""The control channel between two ends of one process, and of two."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from shm.channel import Channel
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
