"""New weights for one engine: from files, or piece by piece, in the ways of both ages of SGLang's protocol.

Invariant: a version label is never set by hand on weights that an engine was told to load: that would give
the name of new weights to old ones.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fa_rollout.client.base.errors import ControlFailed, ControlRefused, NotDone
from fa_rollout.client.engine import readback
from fa_rollout.client.engine.control import (
    flush_cache as flush_cache_of,
)
from fa_rollout.client.engine.control import (
    insist,
    pause,
    post,
    version_of,
)
from fa_rollout.client.engine.endpoints import Engine
from trainer_hook.messages import Probe

_LOG = logging.getLogger(__name__)
TENSORS = "/update_weights_from_tensor"
_UNKNOWN = 404
_LOOK_S = 1.0
"""Between two looks at the label of an engine that loads weights."""
_LABEL_S = 3.0
"""For one such look."""
_MAX_LOADS = 3
"""Of weights that an engine says it has loaded although it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A version in a folder that engines can read."""

    path: str
    """Holds all weights."""
    label: str
    probes: Sequence[Probe] = ()
    """Numbers that an engine must hold then."""


async def load_weights(engine: Engine, files: Files, *, flush_cache: bool, limit_s: float) -> None:
    """The engine loads weights from a folder that it can read, and tells their label.

    Raises:
        ControlFailed: it does not load them, does not tell the label, or holds other weights afterwards.
    """
    await _load(engine, files.path, files.label, flush_cache=flush_cache, limit_s=limit_s)
    await readback.check(engine, files.probes)


async def _load(engine: Engine, path: str, label: str, *, flush_cache: bool, limit_s: float) -> None:
    payload = {
        "model_path": path,
        "weight_version": label,
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }
    for _ in range(_MAX_LOADS):
        answer = await _answer_or_label(engine, payload, limit_s)
        if answer.get("success") is False:
            raise ControlRefused(
                f"{engine.url} must load weights from {path}, found: {answer.get('message')}"
            )
        if await version_of(engine) == label:
            engine.standing.label = label
            return
        _LOG.warning("event=load_not_done endpoint=%s path=%s label=%s", engine.url, path, label)
    raise NotDone(f"{engine.url} reported that it loaded weights from {path}, but its version did not change")


async def _answer_or_label(engine: Engine, payload: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The engine's answer to a load. Its label is as good: the answer may be lost on its way."""
    asking = asyncio.ensure_future(
        insist(engine, lambda try_s: _update(engine, payload, try_s), limit_s=limit_s, try_s=limit_s)
    )
    try:
        while not (await asyncio.wait({asking}, timeout=_LOOK_S))[0]:
            with suppress(ControlFailed):
                if await version_of(engine, _LABEL_S) == payload["weight_version"]:
                    return {}
        return asking.result()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _update(engine: Engine, payload: dict[str, Any], limit_s: float) -> dict[str, Any]:
    path = "/update_weights_from_disk"
    try:
        return await engine.call("POST", path, payload, timeout_s=limit_s)
    except ControlRefused as error:
        # Carried out, and the answer was lost: a refusal that may pass says nothing of the weights.
        if error.may_pass and await version_of(engine) == payload["weight_version"]:
            return {}
        if "must run between" not in str(error):
            raise
    # Newer engines want some updates announced; from disk none has asked for it yet.
    await begin_session(engine)
    try:
        return await engine.call("POST", path, payload, timeout_s=limit_s)
    finally:
        await end_session(engine)


async def begin_session(engine: Engine) -> None:
    """Begin a session of weight pieces, which SGLang wants from 0.5.21 on and does not know before.

    Raises:
        ControlFailed: it does not begin.
    """
    engine.standing.in_session = True
    try:
        await _begin(engine)
    except ControlRefused as error:
        if error.status == _UNKNOWN:
            engine.standing.in_session = False
        elif "already open" in str(error):  # by a life before, or by a call of ours whose answer was lost
            await end_session(engine)
            engine.standing.in_session = True
            await _begin(engine)
        else:
            raise


async def _begin(engine: Engine) -> None:
    await post(engine, "/begin_weight_update", {}, limit_s=engine.policy.update_timeout_s)


async def end_session(engine: Engine) -> None:
    """End the session that we began, if we did.

    Raises:
        ControlFailed: it is not ended, as far as is known.
    """
    if not engine.standing.in_session:
        return
    num_tries = 0

    async def end(try_s: float) -> None:
        nonlocal num_tries
        num_tries += 1
        try:
            await engine.call("POST", "/end_weight_update", {}, timeout_s=try_s)
        except ControlRefused as error:
            if error.may_pass:
                raise
            engine.standing.in_session = False
            if num_tries == 1:
                raise  # else the first try has ended it, and only its answer was lost

    # The end computes what depends on all weights, such as scales of quantized ones.
    limit_s = engine.policy.update_timeout_s
    await insist(engine, end, limit_s=limit_s, try_s=max(engine.policy.control_timeout_s, limit_s / 4))
    engine.standing.in_session = False


async def make_ready(engine: Engine, mode: str) -> None:
    """It stands still, also if it was not there for the pause, and keeps nothing of its old weights."""
    await pause(engine, mode)
    if mode != "in_place":
        await flush_cache_of(engine)


async def destroy_group(engine: Engine, name: str) -> None:
    """One that is gone, or was never there, is no error; one that may be left is remembered."""
    try:
        await insist(
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


def check_taken(engine: Engine, answer: dict[str, Any]) -> None:
    """Raise ControlRefused where the answer says that it was not done."""
    if answer.get("success") is False:
        raise ControlRefused(f"{engine.url} must take weights, found: {answer.get('message')}")
