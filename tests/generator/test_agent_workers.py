"""Agents in their workers: every session ends once, and nothing of it is left."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from fa_rollout.agents.frames import Begin, Ended, Setup
from fa_rollout.agents.pool import AgentWorkers, Running
from fa_rollout.config import ConfigError
from tests.generator.test_agents import on_a_loop


@asynccontextmanager
async def workers(agent: str | None, command: list[str] | None = None) -> AsyncIterator[AgentWorkers]:
    path = None if agent is None else f"tests.generator.users_agents:{agent}"
    pool = AgentWorkers(Setup(agent=path, command=command, sys_path=list(sys.path)), 1)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()


async def begin(pool: AgentWorkers, prompt: str, label: Any = None) -> Running:
    row = {"prompt": prompt, "label": label, "metadata": {}}
    return await pool.begin(
        lambda ticket: Begin(ticket=ticket, address="http://127.0.0.1:1/s", secret=f"s{ticket}", row=row)
    )


async def end_of(pool: AgentWorkers, prompt: str, label: Any = None) -> Ended:
    return await (await begin(pool, prompt, label)).ended


@on_a_loop
async def test_what_an_agent_returns_or_raises_is_told_with_its_place() -> None:
    async with workers("agent") as pool:
        assert (await end_of(pool, "reward", 2.5)).reward == 2.5
        assert (await end_of(pool, "nothing")).reward is None
        assert "must return a reward (a number) or None, found 'text'" in str(
            (await end_of(pool, "reward", "text")).failure
        )
        failure = (await end_of(pool, "raise")).failure
        assert failure is not None
        first, _, trace = failure.partition("\n")
        assert "ValueError: a mistake" in first
        assert "users_agents.py:" in first
        assert "Traceback" in trace
        assert "SystemExit: 3" in str((await end_of(pool, "exit")).failure)
        assert (await end_of(pool, "reward", 1.0)).reward == 1.0


@pytest.mark.parametrize(("agent", "prompt"), [("agent", "sleep"), ("plain", "sleep"), ("agent", "block")])
@on_a_loop
async def test_a_cancelled_session_ends_and_says_where_it_was(agent: str, prompt: str) -> None:
    async with workers(agent) as pool:
        running = await begin(pool, prompt)
        await asyncio.sleep(0.5)
        at = await pool.cancel(running)
        assert at is not None
        assert "users_agents.py:" in at
        assert (await end_of(pool, "reward", 1.0)).reward == 1.0, "its worker, or the next one, works"


@on_a_loop
async def test_the_sessions_of_a_dead_worker_start_anew_and_the_deadly_one_fails() -> None:
    async with workers("agent") as pool:
        others = [await begin(pool, "sleep") for _ in range(2)]
        failure = (await end_of(pool, "die")).failure
        assert "died 2 times, the last time with signal 9" in str(failure)
        assert all(running.num_deaths for running in others)


@on_a_loop
async def test_what_an_agent_starts_ends_with_the_workers() -> None:
    async with workers("agent") as pool:
        await end_of(pool, "spawn", "98765.25")
        assert is_running("98765.25")
    assert not is_running("98765.25")


@on_a_loop
async def test_a_program_is_ended_with_its_whole_tree() -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '98765.5'], start_new_session=True)"
    async with workers(None, [sys.executable, "-c", f"{script}; time.sleep(1000)"]) as pool:
        running = await begin(pool, "any")
        await asyncio.to_thread(wait_for, "98765.5")
        await pool.cancel(running)
        assert not is_running("98765.5")


@on_a_loop
async def test_a_program_that_fails_is_told_with_its_last_words() -> None:
    async with workers(None, [sys.executable, "-c", "import sys; input(); sys.exit('last words')"]) as pool:
        failure = str((await end_of(pool, "any")).failure)
    assert "ended with exit code 1" in failure
    assert "last words" in failure


@on_a_loop
async def test_an_agent_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.agent = .* has no attribute 'nobody'"):
        async with workers("nobody"):
            pass


def wait_for(word: str) -> None:
    while not is_running(word):
        time.sleep(0.05)


def is_running(word: str) -> bool:
    found = subprocess.run(["pgrep", "-f", f"sleep {word}"], capture_output=True, text=True).stdout.split()
    return any(psutil.pid_exists(int(pid)) for pid in found)
