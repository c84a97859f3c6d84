"""Who gets in, and what a broken peer can break: nothing but its own connection."""

import mmap
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest

from fa_rollout.account.snapshot import Snapshot
from shm.channels.channel import Channel
from shm.channels.endpoint import connect
from shm.errors import ChannelClosed, HandshakeRefused
from tests.hub.rig import VOCAB_SIZE, Rig
from tests.kit.scripted import Script, ScriptedEngine
from trainer_hook import TrainerHook
from trainer_hook import messages as m
from trainer_hook.record import schema_fingerprint

MakeRig = Callable[..., Rig]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One that nobody trains in, on an engine of its own: an engine serves one run."""
    with (
        ScriptedEngine.start(Script(vocab_size=VOCAB_SIZE)) as engine,
        Rig(tmp_path_factory.mktemp("reception") / "run", engine) as run,
    ):
        yield run


def hello(rig: Rig, **changes: object) -> m.Hello:
    values = {
        "protocol": m.PROTOCOL,
        "run": rig.run_id,
        "token": rig.token,
        "role": "rank",
        "pid": os.getpid(),
        "schema": schema_fingerprint(),
    }
    return m.Hello(**(values | changes))  # type: ignore[arg-type]


def answer(run: Rig, payload: bytes) -> tuple[m.Message, list[int]]:
    """What the hub says to a first message, and the descriptors that came along."""
    with connect(run.address, time.monotonic() + 5) as channel:
        channel.send(payload)
        message = m.decode(channel.receive(5.0))
        fds = channel.take_fds()
        for fd in fds:
            os.close(fd)
        return message, fds


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "another"}, "another"),
        ({"token": "guessed"}, "token"),
        ({"token": ""}, "token"),
        ({"protocol": m.PROTOCOL + 1}, "protocol"),
        ({"schema": 1}, "schema"),
        ({"dp_rank": 3, "dp_size": 2}, "below"),
    ],
)
def test_a_stranger_is_refused_with_the_reason_and_gets_no_descriptor(
    run: Rig, changes: dict[str, object], text: str
) -> None:
    refused, fds = answer(run, m.encode(hello(run, **changes)))
    assert isinstance(refused, m.Refused)
    assert text in refused.text
    assert not fds
    run.attach().close()


def test_bytes_that_are_no_hello_end_only_their_own_connection(rig: MakeRig) -> None:
    labelled = {"type": "Evaluate", "request": 1, "order": {"prompts": [{"prompt": "", "label": 1}]}}
    nested = msgspec.msgpack.encode(labelled)[:-1] + b"\x91" * 100_000 + b"\x01"
    with rig() as run, run.attach() as hook:
        for payload in (b"", b"\x80\x04K\x01.", b"\xff" * 1000, nested, m.encode(m.Goodbye())):
            refused, fds = answer(run, payload)
            assert isinstance(refused, m.Refused), payload
            assert not fds
        with hook.next_batch() as batch:
            assert batch.samples


def test_the_wrong_run_is_named_on_both_sides(run: Rig) -> None:
    with pytest.raises(HandshakeRefused, match="other-run") as caught:
        TrainerHook.attach(
            address=run.address, run="other-run", token=run.token, dp_rank=0, dp_size=1, timeout_s=5
        )
    assert run.run_id in str(caught.value)


def test_a_second_rank_of_the_same_number_is_refused(rig: MakeRig) -> None:
    with rig() as run, run.attach(0, 2):
        refused, _ = answer(run, m.encode(hello(run, dp_rank=0, dp_size=2)))
        assert isinstance(refused, m.Refused)
        assert str(os.getpid()) in refused.text
        refused, _ = answer(run, m.encode(hello(run, dp_rank=1, dp_size=3)))
        assert isinstance(refused, m.Refused)
        assert "agree" in refused.text


def test_an_observer_reads_figures_and_takes_no_part(run: Rig) -> None:
    with connect(run.address, time.monotonic() + 5) as channel:
        channel.send(m.encode(hello(run, role="observer")))
        assert isinstance(m.decode(channel.receive(5.0)), m.Reply)
        assert snapshot(channel).run.step == 0
        run.attach().close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense",
        m.encode(m.Released(step=0, outcome=None, sequences=[1 << 40])),
        m.encode(m.StateCopied(snapshot=7, sequences=[1 << 40])),
    ],
    ids=["no message", "a record that it has not", "a snapshot that it has not"],
)
def test_a_rank_that_breaks_the_protocol_is_heard_no_more_and_keeps_its_records(
    rig: MakeRig, nonsense: bytes
) -> None:
    with rig() as run, connect(run.address, time.monotonic() + 5) as channel:
        channel.send(m.encode(hello(run)))
        assert isinstance(m.decode(channel.receive(5.0)), m.Welcome)
        channel.send(m.encode(m.Next(request=1, step=0)))
        batch = m.decode(channel.receive(20.0))
        assert isinstance(batch, m.Batch)
        channel.send(nonsense)
        assert isinstance(m.decode(channel.receive(5.0)), m.Refused)
        assert figures(run).ring.oldest_lease_s > 0
        run.attach().close()


def figures(run: Rig) -> Snapshot:
    with connect(run.address, time.monotonic() + 5) as channel:
        channel.send(m.encode(hello(run, role="observer")))
        channel.receive(5.0)
        return snapshot(channel)


def snapshot(channel: Channel) -> Snapshot:
    channel.send(m.encode(m.QuerySnapshot(request=1)))
    taken = m.decode(channel.receive(5.0))
    assert isinstance(taken, m.SnapshotTaken)
    return msgspec.msgpack.decode(taken.snapshot, type=Snapshot)


def test_a_connection_that_says_nothing_does_not_hold_others_up(rig: MakeRig) -> None:
    with rig() as run:
        silent: list[Channel] = [connect(run.address, time.monotonic() + 5) for _ in range(20)]
        with run.attach() as hook, hook.next_batch() as batch:
            assert batch.samples
        for channel in silent:
            channel.close()
        with pytest.raises(ChannelClosed):
            silent[0].receive(0.1)


@pytest.mark.parametrize("limit", [1024, 96])
def test_silent_connections_neither_end_the_run_nor_keep_a_rank_out_nor_fill_the_log(
    rig: MakeRig, limit: int
) -> None:
    """More of them than the hub may have descriptors."""
    with rig() as run, ExitStack() as stack:
        resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(600):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(run.address)
        with run.attach() as hook, hook.next_batch() as batch:
            assert batch.samples
        assert len(run.events("warning")) <= 2


def test_a_rank_cannot_write_to_the_ring(rig: MakeRig) -> None:
    with rig() as run, connect(run.address, time.monotonic() + 5) as channel:
        channel.send(m.encode(hello(run)))
        assert isinstance(m.decode(channel.receive(5.0)), m.Welcome)
        (fd,) = channel.take_fds()
        size = os.fstat(fd).st_size
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ).close()
        if os.geteuid():  # root may open anything
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.close(fd)
