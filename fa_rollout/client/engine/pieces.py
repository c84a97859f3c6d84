"""Calls to one engine by which its weights come piece by piece, in the ways of both ages of SGLang."""

import logging
from typing import Any

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine

_LOG = logging.getLogger(__name__)

TENSORS = "/update_weights_from_tensor"
_BEGIN, _END = "/begin_weight_update", "/end_weight_update"


class Sessions:
    """The sessions around pieces, which SGLang wants from 0.5.21 on and does not know before."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    async def begin(self, engine: Engine, *, limit_s: float) -> None:
        """Begin one, where the engine knows them; one that somebody left open is ended first."""
        try:
            await engine.call("POST", _BEGIN, {}, timeout_s=limit_s)
        except ControlRefused as error:
            if error.status == 404:
                return
            if "already open" not in str(error):
                raise
            await engine.call("POST", _END, {}, timeout_s=limit_s)
            await engine.call("POST", _BEGIN, {}, timeout_s=limit_s)
        self._open.add(engine.url)

    async def end(self, engine: Engine, *, limit_s: float) -> None:
        """End the one that was begun, if one was."""
        if engine.url in self._open:
            self._open.discard(engine.url)
            await engine.call("POST", _END, {}, timeout_s=limit_s)


async def make_ready(engine: Engine, mode: str) -> None:
    """It stands still, also if it was not there for the pause, and keeps nothing of its old weights."""
    await engine.call("POST", "/pause_generation", {"mode": mode})
    if mode != "in_place":
        await control.flush_cache(engine)


async def destroy_group(engine: Engine, name: str) -> None:
    """One that is gone, or was never there, is no error."""
    try:
        await engine.call("POST", "/destroy_weights_update_group", {"group_name": name})
    except ControlFailed as error:
        _LOG.debug("event=group_not_destroyed endpoint=%s error=%s", engine.url, error)


def tensor_body(encoded: bytes, count: int) -> bytes:
    """The JSON of a request; each worker takes an entry of its own, and each needs all of it."""
    entries = b",".join([b'"' + encoded + b'"'] * count)
    return b'{"serialized_named_tensors":[' + entries + b'],"flush_cache":false,"abort_all_requests":false}'


def check(engine: Engine, answer: dict[str, Any]) -> None:
    """Raise ControlRefused where the answer says that it was not done."""
    if answer.get("success") is False:
        raise ControlRefused(f"{engine.url} must take weights, found: {answer.get('message')}")
