"""Calls to one engine by which its weights come piece by piece, in the ways of both ages of SGLang."""

import logging
from typing import Any

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine

_LOG = logging.getLogger(__name__)

TENSORS = "/update_weights_from_tensor"


async def make_ready(engine: Engine, mode: str) -> None:
    """It stands still, also if it was not there for the pause, and keeps nothing of its old weights."""
    await control.pause(engine, mode)
    if mode != "in_place":
        await control.flush_cache(engine)


async def destroy_group(engine: Engine, name: str) -> None:
    """One that is gone, or was never there, is no error; one that may be left is remembered."""
    try:
        await control.insist(
            engine,
            lambda try_s: engine.call(
                "POST", "/destroy_weights_update_group", {"group_name": name}, timeout_s=try_s
            ),
        )
    except ControlFailed as error:
        _LOG.debug("event=group_not_destroyed endpoint=%s error=%s", engine.url, error)
        if error.may_pass:
            return
    engine.standing.groups.discard(name)


def check(engine: Engine, answer: dict[str, Any]) -> None:
    """Raise ControlRefused where the answer says that it was not done."""
    if answer.get("success") is False:
        raise ControlRefused(f"{engine.url} must take weights, found: {answer.get('message')}")
