"""An engine that was lost comes back with the weights of now, and with nothing of what it computed before."""

from pathlib import Path

from fa_rollout.client import ControlFailed, EnginePool
from tests.client.client_kit import run_with, until
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine

LOADS = "/update_weights_from_disk"


def test_an_engine_that_was_away_when_caches_were_emptied_empties_its_own_with_new_weights(
    tmp_path: Path,
) -> None:
    script = Script(lengths=Lengths(tokens=8))

    async def work(pool: EnginePool) -> None:
        pool.weights.assume(None, "default")
        returning.configure(rules=[Rule(path="/health", delay_s=0.4, times=1)])
        staying.configure(rules=[Rule(path="/flush_cache", delay_s=1.0)])
        pool._recovery.lost(pool._fleet.engines[1], ControlFailed("it was not reached"))
        await until(lambda: bool(returning.requests("/health")))
        await pool.pause("retract")
        await pool.weights.load(str(tmp_path), "run:1")
        await pool.continue_()
        await until(lambda: bool(returning.requests(LOADS)))
        await until(lambda: len(pool._fleet.serving) == 2)
        assert await pool.weights.versions() == {staying.url: "run:1", returning.url: "run:1"}
        assert [load.body["flush_cache"] for load in staying.requests(LOADS)] == [False]
        assert staying.requests("/flush_cache")
        assert all(load.body["flush_cache"] for load in returning.requests(LOADS))

    with ScriptedEngine.start(script) as staying, ScriptedEngine.start(script) as returning:
        run_with([staying.url, returning.url], work)
