"""Cutting the stream: at every byte boundary, whatever came before, and in the promised order."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.channels.frames import FRAME, MAGIC, FrameOutbox, Inbox
from shm.errors import ChannelError, MessageTooLarge

_LIMIT = 1 << 20


def test_two_messages_cut_at_every_byte_boundary_arrive_whole() -> None:
    payloads = [b"first", b"", b"the third"]
    stream = b"".join(FRAME.pack(MAGIC, len(payload)) + payload for payload in payloads)
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            inbox = Inbox(_LIMIT)
            for part in (stream[:first], stream[first:second], stream[second:]):
                inbox.feed(memoryview(part))
            assert list(inbox.messages) == payloads
            assert inbox.num_rest_bytes == 0


@given(
    messages=st.lists(st.tuples(st.binary(max_size=50), st.booleans()), max_size=12),
    pieces=st.lists(st.integers(1, 80), min_size=1, max_size=50),
)
@settings(max_examples=200, deadline=None)
def test_partial_sends_at_any_boundary_neither_cut_nor_lose(
    messages: list[tuple[bytes, bool]], pieces: list[int]
) -> None:
    outbox, inbox, received = FrameOutbox(_LIMIT), Inbox(_LIMIT), bytearray()
    for payload, urgent in messages:
        outbox.add(payload, urgent=urgent, fds=())
    count = 0
    while len(outbox):
        wire = b"".join(outbox.batch()[0])
        sent = min(pieces[count % len(pieces)], len(wire))
        received += wire[:sent]
        outbox.sent(sent)
        count += 1
    assert outbox.num_bytes == 0
    inbox.feed(memoryview(bytes(received)))
    urgent_first = [payload for payload, urgent in messages if urgent]
    assert list(inbox.messages) == urgent_first + [payload for payload, urgent in messages if not urgent]


@given(begun=st.integers(0, 30))
@settings(deadline=None)
def test_an_urgent_message_waits_only_for_the_one_that_has_begun(begun: int) -> None:
    outbox, inbox = FrameOutbox(_LIMIT), Inbox(_LIMIT)
    for payload in (b"one", b"two", b"three"):
        outbox.add(payload, urgent=False, fds=())
    wire = b"".join(outbox.batch()[0])[:begun]
    outbox.sent(begun)
    outbox.add(b"stop", urgent=True, fds=())
    while len(outbox):
        rest = b"".join(outbox.batch()[0])
        outbox.sent(len(rest))
        wire += rest
    inbox.feed(memoryview(wire))
    num_before = -(-begun // 11)
    assert list(inbox.messages).index(b"stop") == num_before


def test_descriptors_are_sent_with_their_own_message_and_closed_after_it() -> None:
    outbox = FrameOutbox(_LIMIT)
    before = os.listdir("/proc/self/fd")
    outbox.add(b"plain", urgent=False, fds=())
    outbox.add(b"with", urgent=False, fds=(0,))
    outbox.add(b"after", urgent=False, fds=())
    assert [len(outbox.batch()[0]), outbox.batch()[1]] == [1, []]
    outbox.sent(outbox.num_bytes - 2 * 8 - 9)
    frames, fds = outbox.batch()
    assert len(frames) == len(fds) == 1
    outbox.sent(3)
    assert outbox.batch()[1] == []
    assert os.listdir("/proc/self/fd") == before
    outbox.clear()


@given(junk=st.binary(min_size=8, max_size=100))
@settings(deadline=None)
def test_what_is_no_frame_is_refused_after_what_was_whole(junk: bytes) -> None:
    inbox = Inbox(_LIMIT)
    frame = FRAME.pack(MAGIC, 2) + b"ok"
    if junk.startswith(MAGIC):
        return
    with pytest.raises(ChannelError, match="no part of fa_rollout"):
        inbox.feed(memoryview(frame + junk))
    assert list(inbox.messages) == [b"ok"]


def test_an_announced_length_beyond_the_limit_is_refused_before_it_is_awaited() -> None:
    with pytest.raises(MessageTooLarge):
        Inbox(1000).feed(memoryview(FRAME.pack(MAGIC, 1001)))
