"""Control calls to one engine, in the ways of both ages of SGLang's protocol.

Invariant: nothing here ends a request that is not ours, but a pause whose mode is to abort.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.engine.endpoints import Engine

_LOG = logging.getLogger(__name__)
IN_PIECES = "in-pieces"
"""Label of an engine whose weights are being replaced piece by piece: no version."""
_PAUSE_PROBE_S = 3.0
_FLUSH_PATIENCE_S = 5.0
"""SGLang looks every 4 s for clients that have hung up, and then gives their requests up, also in a pause."""
_FLUSH_RETRY_S = 0.5


async def model_info(engine: Engine) -> dict[str, Any]:
    """Model path, weight version and more."""
    try:
        return await engine.call("GET", "/model_info")
    except ControlRefused as error:
        if error.status != 404:
            raise
        return await engine.call("GET", "/get_model_info")


async def version_of(engine: Engine) -> str | None:
    """The version label that an engine tells now."""
    label = (await model_info(engine)).get("weight_version")
    return None if label is None else str(label)


async def set_label(engine: Engine, label: str) -> None:
    """The engine tells this label from now on; one that does already is left alone.

    Raises:
        ControlFailed: it does not.
    """
    if await version_of(engine) == label:
        return
    # abort_all_requests is true by default, and would end everybody's requests.
    await engine.call("POST", "/update_weight_version", {"new_version": label, "abort_all_requests": False})
    found = await version_of(engine)
    if found != label:
        raise ControlRefused(f"{engine.url} must tell weight version {label!r}, found {found!r}")


@asynccontextmanager
async def emptied(engine: Engine, limit_s: float) -> AsyncIterator[None]:
    """No request runs on the engine: those that do are aborted, further ones wait at its door.

    Raises:
        ControlFailed: it does not stand still, or does not go on.
    """
    await engine.call("POST", "/pause_generation", {"mode": "abort"}, timeout_s=limit_s)
    try:
        yield
    finally:
        await engine.call("POST", "/continue_generation", {})


async def flush_cache(engine: Engine) -> None:
    """The engine empties its prefix cache.

    Raises:
        ControlFailed: it cannot; before 0.5.23 a single request in its queue is a reason.
    """
    give_up_s = time.monotonic() + _FLUSH_PATIENCE_S
    while True:
        try:
            await engine.call("POST", "/flush_cache", {})
            return
        except ControlRefused as error:
            if time.monotonic() > give_up_s:
                text = f"{engine.url} must empty its prefix cache before new weights, its requests forbid it"
                raise ControlRefused(f"{text}: {error}", error.status) from error
        await asyncio.sleep(_FLUSH_RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A version in a folder that engines can read."""

    path: str
    """Holds all weights."""
    label: str
    changed: str | None = None
    """Folder of what differs from the version labelled `base`, for engines that hold that."""
    base: str | None = None


async def load_weights(
    engine: Engine, files: Files, *, takes_parts: bool, flush_cache: bool, limit_s: float
) -> None:
    """The engine loads weights from a folder that it can read, and tells their label.

    `takes_parts`: it keeps what a folder does not hold. True of SGLang where the model is not quantized: then
    weights are copied as they come, and nothing is computed of all of them.

    Raises:
        ControlFailed: it does not load them, or does not tell the label.
    """
    if takes_parts and files.changed is not None and await version_of(engine) == files.base:
        try:
            await _load(engine, files.changed, files.label, flush_cache=flush_cache, limit_s=limit_s)
            return
        except ControlRefused as error:
            _LOG.warning("event=part_refused endpoint=%s error=%s", engine.url, error)
    await _load(engine, files.path, files.label, flush_cache=flush_cache, limit_s=limit_s)


async def _load(engine: Engine, path: str, label: str, *, flush_cache: bool, limit_s: float) -> None:
    payload = {
        "model_path": path,
        "weight_version": label,
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }
    try:
        answer = await engine.call("POST", "/update_weights_from_disk", payload, timeout_s=limit_s)
    except ControlRefused as error:
        if "must run between" not in str(error):
            raise
        answer = await _bracketed(engine, payload, limit_s)
    if answer.get("success") is False:
        raise ControlRefused(f"{engine.url} must load weights from {path}, found: {answer.get('message')}")
    await set_label(engine, label)


async def _bracketed(engine: Engine, payload: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Newer engines want some updates announced; from disk none has asked for it yet."""
    await engine.call("POST", "/begin_weight_update", {}, timeout_s=limit_s)
    try:
        return await engine.call("POST", "/update_weights_from_disk", payload, timeout_s=limit_s)
    finally:
        await engine.call("POST", "/end_weight_update", {}, timeout_s=limit_s)


async def abort(engine: Engine, wire_id: str) -> bool:
    """End one request; False when the engine was not reached."""
    try:
        await engine.call("POST", "/abort_request", {"rid": wire_id})
    except ControlFailed as error:
        level = logging.DEBUG if engine.missed_abort else logging.WARNING  # an outage strikes many at once
        _LOG.log(level, "event=abort_not_delivered wire_id=%s error=%s", wire_id, error)
        engine.missed_abort = True
        return False
    engine.missed_abort = False
    return True


async def looks_paused(engine: Engine) -> bool:
    """Whether somebody has paused the engine.

    SGLang has no flag for it. Where /ready exists it is 503 in a pause; before that, /health (which runs a
    token) is silent while control calls are answered.
    """
    if await engine.status("/model_info", _PAUSE_PROBE_S) is None:
        return False
    ready = await engine.status("/ready", _PAUSE_PROBE_S)
    if ready is not None and ready != 404:
        return ready == 503
    return await engine.status("/health", _PAUSE_PROBE_S) in (None, 503)
