"""What an engine is: its versions and the layout of its answers, found by asking it."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fa_rollout.client.base.errors import (
    ControlFailed,
    ControlRefused,
    EnginePaused,
    EngineUnavailable,
    InvalidReply,
    KeyRefused,
)
from fa_rollout.client.base.policy import KEY_STATUSES
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine, HttpFailure
from fa_rollout.client.engine.labels import OF_START
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.wire.completion import Completion
from fa_rollout.client.wire.decode import decode_reply
from fa_rollout.client.wire.request import answer_limit, generate_body
from fa_rollout.client.wire.verdict import ServerVerdict

T = TypeVar("T")
logger = logging.getLogger(__name__)

_TELL_EVERY_S = 10.0
_RETRY_S = 0.5


async def probe(engine: Engine, rid: str, limit_s: float, *, ends_pauses: bool) -> EngineInfo:
    """Ask for the model and the server, and for one token.

    An engine that stands paused for so long goes on, if `ends_pauses`.

    Raises:
        EnginePaused: it stands paused, and not by us.
        ControlFailed: it does not answer.
        InvalidReply: its answer has not what is needed.
    """
    model = await control.model_info(engine)
    server = await _server_info(engine)
    # The folder of the weights that were loaded last may be gone with the run that wrote it.
    config = model_config(model.get("model_path")) or model_config(model.get("tokenizer_path"))
    reply = await _one_token(engine, rid, limit_s, ends_pauses=ends_pauses)
    return EngineInfo(
        url=engine.url,
        version_label=_text(model.get("weight_version")),
        has_spans=reply.has_spans,
        model_path=_text(model.get("model_path")),
        server_version=_text(server.get("version")),
        vocab_size=vocab_size_of(config),
        context_length=_context_length(server),
        num_workers=_number(server.get("tp_size"), 1),
        tokenizer_path=_text(model.get("tokenizer_path")),
    )


async def recognised(engine: Engine, known: EngineInfo) -> EngineInfo | None:
    """What was found before, with the version of now; None when it serves another model by now.

    Raises:
        ControlFailed: it does not answer.
    """
    model = await control.model_info(engine)
    path, label = _text(model.get("model_path")), _text(model.get("weight_version"))
    if _text(model.get("tokenizer_path")) != known.tokenizer_path:
        return None
    if path != known.model_path and label in OF_START:
        return None
    return replace(known, version_label=label, model_path=path)


async def patiently(work: Callable[[], Awaitable[T]], deadline: float, url: str) -> T:
    """Try again until the deadline (time.monotonic()): an engine may still be loading its model.

    A pause of somebody else's has no deadline here: what waits for this knows its own.

    Raises:
        EngineUnavailable: names the last error.
    """
    told_s = time.monotonic()
    while True:
        try:
            return await work()
        except InvalidReply as error:
            raise EngineUnavailable(f"{url}: {error}") from error
        except KeyRefused as error:
            raise EngineUnavailable(str(error)) from error
        except ControlFailed as error:
            is_late = time.monotonic() + _RETRY_S > deadline
            if is_late and not isinstance(error, EnginePaused):
                raise EngineUnavailable(f"{url}: {error}") from error
            now_s = time.monotonic()
            if now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
                left_s = max(0.0, deadline - now_s)
                logger.info("event=waiting_for_engine url=%s left_s=%.0f error=%s", url, left_s, error)
        await asyncio.sleep(_RETRY_S)


async def _one_token(engine: Engine, rid: str, limit_s: float, *, ends_pauses: bool) -> Completion:
    sampling = {"max_new_tokens": 1, "ignore_eos": True}
    body = generate_body(rid, [1], sampling, options={})
    wish = f"{engine.url} must answer a request of one token"
    try:
        async with asyncio.timeout(limit_s):
            limit = answer_limit([1], sampling, {})
            reply = decode_reply(await engine.generate(body, None, limit), engine=engine.url)
    except (HttpFailure, ServerVerdict) as error:
        if error.status in KEY_STATUSES:
            raise KeyRefused(f"{wish}, found {error}") from error
        raise ControlFailed(f"{wish}, found {error}") from error
    except TimeoutError as error:
        found = f"silence for {limit_s:g} s"
        is_paused = await control.looks_paused(engine)
        if is_paused and not ends_pauses:
            raise EnginePaused(f"{wish}, found a pause that only who began it may end") from error
        if is_paused:
            # Whoever paused it for an update that takes so long would find it as it is: engines load under a
            # lock of their own. A run that was killed in an update never comes back.
            found += " in a pause that nobody ended; it goes on now"
            engine.standing.is_paused = True  # ours to end from here on, as often as it takes
            await control.continue_(engine)
        raise ControlFailed(f"{wish}, found {found}") from error
    if len(reply.output_ids) != 1:
        raise ControlFailed(f"{wish}, found {len(reply.output_ids)} tokens and finish {reply.finish!r}")
    return reply


async def _server_info(engine: Engine) -> dict[str, Any]:
    for path in ("/server_info", "/get_server_info"):
        try:
            return await engine.call("GET", path)
        except ControlRefused:
            continue
    return {}


def _context_length(server: dict[str, Any]) -> int | None:
    """As it was configured, or as its limit on prompts shows: SGLang keeps 6 tokens free beyond that."""
    configured, input_limit = server.get("context_length"), server.get("max_req_input_len")
    known = [configured] if isinstance(configured, int) else []
    known += [input_limit + 6] if isinstance(input_limit, int) else []
    return min(known, default=None)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def model_config(folder: Any) -> dict[str, Any] | None:
    """The `config.json` of a model's folder; None where it cannot be read here."""
    try:
        config = json.loads((Path(str(folder)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def vocab_size_of(config: dict[str, Any] | None) -> int | None:
    """Number of token ids that a model has, as its configuration says."""
    if config is None:
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None
