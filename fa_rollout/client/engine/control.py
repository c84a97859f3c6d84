"""Pauses, labels and aborts of one engine, in the ways of both ages of SGLang's protocol.

Invariant: nothing here ends a request that is not ours, but a pause whose mode is to abort.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fa_rollout.client.base.errors import ControlFailed, ControlRefused, ControlUnanswered, NotDone
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.labels import IN_PIECES

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_PAUSE_PROBE_S = 3.0
_PAUSE_AGE_S = 0.5
_NOT_READY = 503
_MAX_LOOKS = 3
"""After requests to continue, for an engine that says that it does, and does not."""
_FLUSH_PATIENCE_S = 5.0
"""SGLang looks every 4 s for clients that have hung up, and then gives their requests up, also in a pause."""
_FLUSH_RETRY_S = 0.5
_REPEAT_S = 0.25
"""Between two tries of a call that may be repeated."""


async def insist(
    engine: Engine,
    call: Callable[[float], Awaitable[T]],
    *,
    limit_s: float | None = None,
    try_s: float | None = None,
    only_refused: bool = False,
) -> T:
    """Repeat a call that does no harm when it is carried out twice, until the engine has accepted it.

    Calls are repeated that were not answered, or were refused in a way that may pass (`may_pass`). At an
    address where nobody listens it is tried twice: an idle connection may have died.

    Args:
        call: gets the time within which it must be answered.
        limit_s: for all tries; None: `control_timeout_s`.
        try_s: for the first one, later ones get more; None: `control_try_s`.
        only_refused: repeat refusals alone: behind a lost connection may be another process by the next try.

    Raises:
        ControlFailed: of the last try.
    """
    policy = engine.policy
    limit_s = policy.control_timeout_s if limit_s is None else limit_s
    try_s = policy.control_try_s if try_s is None else try_s
    began_s, was_lost = time.monotonic(), False
    while True:
        left_s = limit_s - (time.monotonic() - began_s)
        try:
            return await call(max(_REPEAT_S, min(try_s, left_s)))
        except ControlFailed as error:
            spent_s = time.monotonic() - began_s
            is_refused = isinstance(error, ControlRefused)
            patience_s = min(limit_s, policy.refusal_patience_s) if is_refused else limit_s
            if (
                (only_refused and not is_refused)
                or not error.may_pass
                or was_lost
                or spent_s + _REPEAT_S >= patience_s
            ):
                raise
            was_lost = not isinstance(error, ControlRefused | ControlUnanswered)
            if isinstance(error, ControlUnanswered):
                try_s *= 2
            _LOG.info("event=control_repeated endpoint=%s error=%s", engine.url, error)
        await asyncio.sleep(_REPEAT_S)


async def post(
    engine: Engine,
    path: str,
    payload: dict[str, Any],
    *,
    limit_s: float | None = None,
    try_s: float | None = None,
) -> None:
    """Repeat a call until the engine has accepted it, as `insist` does."""

    async def call(left_s: float) -> None:
        await engine.call("POST", path, payload, timeout_s=left_s)

    await insist(engine, call, limit_s=limit_s, try_s=try_s)


async def pause(engine: Engine, mode: str) -> None:
    """The engine pauses; harmless when it is paused.

    Raises:
        ControlFailed: it does not, as far as is known: it may be paused all the same.
    """
    engine.standing.is_paused = True
    policy = engine.policy
    # By `abort` it answers when its last request has ended; the other modes are a matter of moments.
    try_s = policy.pause_timeout_s if mode == "abort" else None
    await post(engine, "/pause_generation", {"mode": mode}, limit_s=policy.pause_timeout_s, try_s=try_s)


async def continue_(engine: Engine, *, limit_s: float | None = None) -> None:
    """The engine runs again; harmless when it runs.

    Raises:
        ControlFailed: it has not accepted it.
    """
    num_tries = 0

    async def go(left_s: float) -> None:
        nonlocal num_tries
        num_tries += 1
        await engine.call("POST", "/continue_generation", {}, timeout_s=left_s)
        # Where it exists, /ready is 503 in a pause; a health check that failed in the pause leaves it so.
        if num_tries < _MAX_LOOKS and await engine.status("/ready", _PAUSE_PROBE_S) == _NOT_READY:
            raise NotDone(f"{engine.url} must run after /continue_generation, found it not ready")

    await insist(engine, go, limit_s=limit_s, try_s=None if limit_s is None else limit_s / 2)
    engine.standing.is_paused = False


async def model_info(engine: Engine, limit_s: float | None = None) -> dict[str, Any]:
    """Model path, weight version and more."""
    try:
        return await engine.call("GET", "/model_info", timeout_s=limit_s)
    except ControlRefused as error:
        if error.status != 404:
            raise
        return await engine.call("GET", "/get_model_info", timeout_s=limit_s)


async def version_of(engine: Engine, limit_s: float | None = None) -> str | None:
    """The version label that an engine reports; `limit_s` for one look that is not repeated."""
    if limit_s is not None:
        info = await model_info(engine, limit_s)
    else:
        info = await insist(engine, lambda try_s: model_info(engine, try_s))
    label = info.get("weight_version")
    return None if label is None else str(label)


async def set_label(engine: Engine, label: str, *, in_place_of: str | None = None) -> None:
    """The engine reports this label from now on; one that does already is left alone.

    Args:
        in_place_of: the label that it must have until then; None: any.

    Raises:
        ControlFailed: it does not; also where another label was found, as of an engine that was restarted.
    """

    async def ensure(try_s: float) -> None:
        found = await version_of(engine, try_s)
        if found == label:
            return
        if in_place_of is not None and found != in_place_of:
            raise ControlFailed(f"{engine.url} must report {in_place_of!r} until now, found {found!r}")
        # abort_all_requests is true by default, and would end everybody's requests.
        payload = {"new_version": label, "abort_all_requests": False}
        await engine.call("POST", "/update_weight_version", payload, timeout_s=try_s)
        found = await version_of(engine, try_s)
        if found != label:
            raise NotDone(f"{engine.url} must report weight version {label!r}, found {found!r}")

    await insist(engine, ensure)
    if label != IN_PIECES:
        engine.standing.label = label


@asynccontextmanager
async def emptied(engine: Engine) -> AsyncIterator[None]:
    """No request runs on the engine: those that do are aborted, further ones wait at its door.

    Raises:
        ControlFailed: it does not pause, or does not continue.
    """
    try:
        await pause(engine, "abort")
        yield
    finally:
        await continue_(engine)


async def flush_cache(engine: Engine) -> None:
    """The engine empties its prefix cache.

    Raises:
        ControlFailed: it cannot; before 0.5.23 a single request in its queue is a reason.
    """
    give_up_s = time.monotonic() + _FLUSH_PATIENCE_S
    while True:
        try:
            await post(engine, "/flush_cache", {})
            return
        except ControlRefused as error:
            if time.monotonic() > give_up_s:
                text = f"{engine.url} must empty its prefix cache before new weights, its requests forbid it"
                raise ControlRefused(f"{text}: {error}", error.status) from error
        await asyncio.sleep(_FLUSH_RETRY_S)


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


async def is_paused_by_others(engine: Engine) -> bool:
    """Whether somebody else has paused the engine; looked at twice a second at most."""
    standing = engine.standing
    async with standing.look:
        if not standing.is_paused and time.monotonic() >= standing.looked_s + _PAUSE_AGE_S:
            standing.looked_paused = await looks_paused(engine)
            standing.looked_s = time.monotonic()
        return standing.looked_paused and not standing.is_paused
