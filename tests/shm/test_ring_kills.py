"""The ring when a process is killed at each marked publish or observe point, and at random moments."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ring_crew
import sync_points

from shm import RingTable
from shm.channels.channel import Channel
from shm.errors import ChannelClosed
from shm.ring.segment import Segment

_CREW = Path(__file__).with_name("ring_crew.py")
_RING_BYTES = 1 << 18


def test_every_mark_names_a_partner_that_exists() -> None:
    points = sync_points.all_points()
    names = {point.name for point in points}
    assert len(names) == len(points) >= 8
    assert {point.partner for point in points} <= names


class Crew:
    """The hub, in this process, with a writer and a reader that work on their own."""

    def __init__(self) -> None:
        self.segment = Segment.create(_RING_BYTES)
        self.table = RingTable(_RING_BYTES)
        self.hub = ring_crew.Hub(self.table)
        self.reader = self.start("reader")

    def start(self, role: str, *extra: str) -> "Member":
        return Member(role, self.segment, extra)

    def start_writer(self, *extra: str) -> "Member":
        head, sequence = self.table.restart()
        state = {
            "incarnation": self.table.incarnation,
            "head": head,
            "tail": self.table.tail,
            "sequence": sequence,
        }
        return self.start("writer", json.dumps(state), *extra)

    def work(self, writer: "Member", until: int) -> None:
        """Be the hub until so many records were read, or somebody is gone."""
        while self.hub.num_checked < until:
            self.hub.turn(writer.channel, self.reader.channel)

    def close(self) -> None:
        self.reader.end()
        self.segment.close()


class Member:
    """A child process with its channel."""

    def __init__(self, role: str, segment: Segment, extra: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), segment.fd)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(_CREW), role, *map(str, fds), *extra],
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": str(_CREW.parents[2])},
            )
        self.channel = Channel(ours)

    def end(self) -> int:
        self.channel.close()
        self.process.kill()
        return self.process.wait(30)


def _lose_writer(crew: Crew, writer: Member) -> None:
    """Work until the writer is dead; what it had sent counts."""
    with pytest.raises(ChannelClosed):
        crew.work(writer, until=1 << 30)
    assert writer.process.wait(30) == -signal.SIGKILL
    writer.channel.close()


def _all_given_back(crew: Crew) -> None:
    """Everything that was admitted was read true, and the ring is empty when the reader is gone too."""
    deadline_s = time.monotonic() + 30
    while crew.hub.num_checked < crew.hub.num_admitted:
        assert time.monotonic() < deadline_s
        crew.hub.turn(None, crew.reader.channel)
    crew.reader.end()
    crew.hub.reader_lost()
    figures = crew.table.statistics()
    assert crew.hub.num_admitted == crew.hub.num_checked == figures.num_freed
    assert (figures.num_live, figures.num_leases, figures.num_refused) == (0, 0, 0)


_OF_WRITER = ["tail-observed", "record-written", "bytes-sent", "bytes-received"]
_OF_READER = ["record-opened", "record-released", "bytes-sent", "bytes-received"]
_OF_HUB = ["commit-received", "release-received", "tail-told", "bytes-sent", "bytes-received"]


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("point", _OF_WRITER)
def test_a_writer_killed_at_a_point_loses_only_what_it_had_not_sent(point: str, side: str) -> None:
    crew = Crew()
    _lose_writer(crew, crew.start_writer(point, side, "20"))
    second = crew.start_writer()
    crew.work(second, until=crew.hub.num_checked + 50)
    second.process.kill()
    _lose_writer(crew, second)
    _all_given_back(crew)
    crew.close()


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("point", _OF_READER)
def test_a_reader_killed_at_a_point_gives_back_all_that_it_held(point: str, side: str) -> None:
    crew = Crew()
    crew.reader.end()
    crew.reader = crew.start("reader", point, side, "20")
    writer = crew.start_writer()
    with pytest.raises(ChannelClosed):
        crew.work(writer, until=1 << 30)
    assert crew.reader.process.wait(30) == -signal.SIGKILL
    crew.reader.end()
    crew.hub.reader_lost()
    crew.reader = crew.start("reader")
    crew.work(writer, until=crew.hub.num_checked + 50)
    writer.process.kill()
    _lose_writer(crew, writer)
    _all_given_back(crew)
    crew.close()


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("point", _OF_HUB)
def test_when_the_hub_is_killed_at_a_point_both_others_notice_and_views_stay(point: str, side: str) -> None:
    process = subprocess.run(
        [sys.executable, str(_CREW), "hub", str(_RING_BYTES), point, side, "20"],
        env={**os.environ, "PYTHONPATH": str(_CREW.parents[2])},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    # Both children share the hub's standard output, so `run` returned only when they had ended too.
    assert sorted(process.stdout.decode().split()) == ["reader-saw-it", "views-intact", "writer-saw-it"]
    assert b"Traceback" not in process.stderr


def test_writers_killed_at_random_moments_lose_only_what_they_had_not_sent() -> None:
    crew = Crew()
    random = np.random.default_rng(0)
    for _ in range(6):
        writer = crew.start_writer()
        crew.work(writer, until=crew.hub.num_checked + 1)
        deadline_s = time.monotonic() + float(random.uniform(0, 0.05))
        while time.monotonic() < deadline_s:
            crew.hub.turn(writer.channel, crew.reader.channel)
        writer.process.kill()
        _lose_writer(crew, writer)
    _all_given_back(crew)
    crew.close()
