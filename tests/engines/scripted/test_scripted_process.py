"""The scripted router, and the life of a scripted process."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.engines.scripted.scripted_kit import Plain, request, run_with
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine
from tests.kit.scripted.journal import Entry

QUICK_ANSWERS = Script(lengths=Lengths(tokens=8))


def test_a_router_passes_on_what_it_knows_and_drops_the_rest() -> None:
    with (
        ScriptedEngine.start(QUICK_ANSWERS) as worker,
        ScriptedEngine.start(Script(workers=[worker.url])) as router,
    ):

        async def work(plain: Plain) -> None:
            body = request("r") | {"extra_key": "k", "return_routed_experts": True, "nonsense": 1}
            status, answer = await plain.post("/generate", body)
            assert (status, len(answer["output_ids"])) == (200, 8)
            workers = (await plain.get("/workers"))[1]["workers"]
            assert [(w["url"], w["is_healthy"]) for w in workers] == [(worker.url, True)]
            for path in ("/abort_request", "/pause_generation", "/update_weights_from_disk"):
                assert (await plain.post(path, {}))[0] == 404

        run_with(router, work)
        (got,) = worker.requests("/generate")
        assert got.rid == "r"
        assert "nonsense" in router.requests("/generate")[0].body
        assert "nonsense" not in got.body


def test_a_journal_has_every_answer_as_it_was_before_a_fault_changed_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    script = Script(lengths=Lengths(tokens=8), rules=[Rule(last_id=7, times=1)], journal=str(path))
    with ScriptedEngine.start(script) as engine:

        async def work(plain: Plain) -> None:
            lie, truth = [(await plain.post("/generate", request(rid)))[1] for rid in ("r", "s")]
            assert lie["output_ids"][-1] == 7
            entries = [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]
            assert [entry.rid for entry in entries] == ["r", "s"]
            assert [msgspec.json.decode(e.answer)["output_ids"] for e in entries] == [truth["output_ids"]] * 2
            assert entries[0].spans == [("default", 8)]

        run_with(engine, work)


def test_a_router_without_a_healthy_worker_answers_503() -> None:
    with (
        ScriptedEngine.start(QUICK_ANSWERS) as worker,
        ScriptedEngine.start(Script(workers=[worker.url], router_health_s=0.1)) as router,
    ):

        async def work(plain: Plain) -> None:
            await Plain(plain._session, worker).post("/pause_generation", {"mode": "retract"})
            await plain.state(healthy=[])
            assert (await plain.post("/generate", request("r")))[0] == 503
            assert not (await plain.get("/workers"))[1]["workers"][0]["is_healthy"]

        run_with(router, work)


def test_a_router_that_retries_does_so_under_the_same_id() -> None:
    rule = Rule(status=500, body="no", times=2)
    with (
        ScriptedEngine.start(QUICK_ANSWERS, rules=[rule]) as worker,
        ScriptedEngine.start(Script(workers=[worker.url], router_retries=4)) as router,
    ):
        run_with(router, lambda plain: plain.generate("r"))
        assert [r.rid for r in worker.requests("/generate")] == ["r"] * 3


_PARENT = """
import subprocess, sys, os
command = [sys.executable, "-m", "tests.kit.scripted", "--parent-pid", str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        watched = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        limit = time.monotonic() + 10
        assert select.select([watched], [], [], limit - time.monotonic())[0]
        os.close(watched)


def test_an_engine_stops_when_told_and_stop_can_be_called_again() -> None:
    engine = ScriptedEngine.start(QUICK_ANSWERS)
    engine.stop()
    engine.stop()
    assert engine.process.returncode == 0


def test_an_engine_that_cannot_start_is_an_error() -> None:
    with (
        ScriptedEngine.start(QUICK_ANSWERS) as engine,
        pytest.raises(RuntimeError, match="must start, found exit status"),
    ):
        ScriptedEngine.start(QUICK_ANSWERS, port=int(engine.url.rsplit(":", 1)[1]))
