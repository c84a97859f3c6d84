"""A rank is let in when the hub is ready, or told how far it came."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from peer import RUN, TOKEN, Hub, Line, Ring, accept

from shm.channels.endpoint import listen
from trainer_hook import AttachTimeout, HandshakeRefused, HookStateError, TrainerHook
from trainer_hook import messages as m
from trainer_hook.record import schema_fingerprint

WHERE = {"run": RUN, "token": TOKEN}


def test_address_and_place_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(line: Line) -> None:
        hello = line.hello
        assert hello is not None
        assert (hello.run, hello.token, hello.role, hello.pid) == (RUN, TOKEN, "rank", os.getpid())
        assert (hello.protocol, hello.schema) == (m.PROTOCOL, schema_fingerprint())
        assert (hello.dp_rank, hello.dp_size) == (2, 8)
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub:
        for name, value in hub.where.items():
            monkeypatch.setenv(f"FA_ROLLOUT_{name.upper()}", value)
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "8")
        TrainerHook.attach().close()


@pytest.mark.parametrize("missing", ["ADDRESS", "RUN", "TOKEN"])
def test_a_trainer_that_was_not_started_by_the_launcher_is_told_how(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADDRESS", "RUN", "TOKEN"):
        monkeypatch.setenv(f"FA_ROLLOUT_{name}", "something")
    monkeypatch.delenv(f"FA_ROLLOUT_{missing}")
    with pytest.raises(HookStateError, match=f"FA_ROLLOUT_{missing} is not set: start the trainer with"):
        TrainerHook.attach()


def test_a_rank_waits_for_a_hub_that_comes_up_late(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir(mode=0o700)
    address = folder / "late.sock"

    def come_up() -> None:
        time.sleep(0.3)
        with listen(folder) as listener:
            os.rename(listener.address, address)
            listener.address = str(address)
            with accept(listener) as channel:
                time.sleep(0.3)
                line = Line(channel, Ring())
                line.let_in()
                line.receive(m.Goodbye)

    thread = threading.Thread(target=come_up)
    thread.start()
    TrainerHook.attach(address=address, timeout_s=20, **WHERE).close()
    thread.join()


def test_stages_that_were_reached_are_named_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(AttachTimeout, match="there is no such socket"):
        TrainerHook.attach(address=tmp_path / "none.sock", timeout_s=0.1, **WHERE)

    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    with pytest.raises(AttachTimeout, match="nobody listens"):
        TrainerHook.attach(address=dead, timeout_s=0.1, **WHERE)

    with (
        listen(tmp_path / "hub") as listener,
        pytest.raises(AttachTimeout, match="accepted the connection of rank 3 and did not answer"),
    ):
        TrainerHook.attach(address=listener.address, timeout_s=0.1, dp_rank=3, dp_size=4, **WHERE)


def test_a_hub_that_ends_during_the_handshake_is_told(tmp_path: Path) -> None:
    with (
        Hub(tmp_path, lambda line: line.receive(m.Hello) and None, welcome=False) as hub,
        pytest.raises(AttachTimeout, match="it exited before it answered rank 0"),
    ):
        TrainerHook.attach(**hub.where)


def test_a_refused_rank_learns_why_by_the_errors_own_class(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.receive(m.Hello)
        line.send(m.Refused(error="HandshakeRefused", text="all ranks must agree on their number"))

    with Hub(tmp_path, script, welcome=False) as hub, pytest.raises(HandshakeRefused, match="must agree"):
        TrainerHook.attach(**hub.where)


def test_no_descriptor_is_left_after_a_close_or_a_refusal(tmp_path: Path) -> None:
    def refuse(line: Line) -> None:
        line.receive(m.Hello)
        line.send(m.Refused(error="HandshakeRefused", text="no"))

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = set(os.listdir("/proc/self/fd"))
    with Hub(tmp_path / "a", lambda line: line.receive(m.Goodbye) and None) as hub:
        TrainerHook.attach(**hub.where).close()
    with Hub(tmp_path / "b", refuse, welcome=False) as hub, pytest.raises(HandshakeRefused):
        TrainerHook.attach(**hub.where)
    del hub  # its ring keeps a mapping, and that a descriptor
    assert set(os.listdir("/proc/self/fd")) == before
