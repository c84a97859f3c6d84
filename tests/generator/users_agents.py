"""Agents as users write them, well and badly, for `test_agent_workers`."""

import asyncio
import os
import signal
import subprocess
import time
from typing import Any

from fa_rollout.agents import AgentSession


async def agent(session: AgentSession) -> Any:
    """Does what the row's prompt says."""
    match session.prompt:
        case "reward":
            return session.label
        case "raise":
            raise ValueError("a mistake")
        case "exit":
            raise SystemExit(3)
        case "sleep":
            await asyncio.sleep(1000)
        case "block":
            time.sleep(1000)  # noqa: ASYNC251
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spawn":
            subprocess.Popen(["sleep", session.label], start_new_session=True)  # noqa: ASYNC220
    return None


def plain(session: AgentSession) -> Any:
    """The same in a thread."""
    if session.prompt == "sleep":
        while True:
            time.sleep(0.05)
    return session.label
