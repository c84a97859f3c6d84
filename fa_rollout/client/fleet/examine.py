"""A look at engines from outside, for people: what they are and can do. Nothing about them is changed.

In: addresses. Out: an `Examined` for each, or why it does not answer.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fa_rollout.client.base.errors import (
    ClientError,
    ControlFailed,
    ControlRefused,
    EnginePaused,
    EngineUnavailable,
)
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.endpoints import Engine, HttpFailure
from fa_rollout.client.engine.network import open_session
from fa_rollout.client.engine.probe import patiently, probe
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.wire.address import engine_url
from fa_rollout.client.wire.completion import Completion
from fa_rollout.client.wire.decode import decode_reply
from fa_rollout.client.wire.request import TokenIds, WireIds, answer_limit, generate_body
from fa_rollout.client.wire.verdict import ServerVerdict

_WAYS = {
    "files": "/update_weights_from_disk",
    "tensors": "/update_weights_from_tensor",
    "broadcast": "/update_weights_from_distributed",
}
_WRONG_METHOD = 405


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What one engine is and can do."""

    info: EngineInfo
    probe_s: float
    """Its probe took so long: three questions and a token."""
    can_pause: bool
    update_ways: tuple[str, ...]
    """Of `files`, `tensors` and `broadcast`."""
    has_brackets: bool
    """It has `/begin_weight_update`, which newer releases want around tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """Why an engine could not be examined."""

    url: str
    text: str


async def examine(urls: Sequence[str], *, router: bool, patience_s: float) -> list[Examined | Unanswered]:
    """Ask every engine; behind a router, each of its workers."""
    policy = FailurePolicy(start_timeout_s=patience_s, control_timeout_s=patience_s)
    async with open_session(policy) as session:
        fleet = Fleet([engine_url(url) for url in urls], router=router, session=session, policy=policy)
        deadline = time.monotonic() + patience_s
        if router:
            try:
                await patiently(fleet.refresh, deadline, urls[0])
            except ClientError as error:
                return [Unanswered(url=urls[0], text=str(error))]
        ids = WireIds()
        return list(
            await asyncio.gather(*(_one(engine, ids, deadline, patience_s) for engine in fleet.engines))
        )


async def _one(engine: Engine, ids: WireIds, deadline: float, limit_s: float) -> Examined | Unanswered:
    began_s = 0.0

    async def ask() -> EngineInfo:
        nonlocal began_s
        began_s = time.monotonic()
        try:
            return await probe(engine, ids.make("doctor"), limit_s, ends_pauses=False)
        except EnginePaused as error:  # which is not waited out: who looks wants to know
            raise EngineUnavailable(str(error)) from error

    try:
        info = await patiently(ask, deadline, engine.url)
        probe_s = time.monotonic() - began_s
        ways = [name for name, path in _WAYS.items() if await _has(engine, path)]
        return Examined(
            info=info,
            probe_s=probe_s,
            can_pause=await _has(engine, "/pause_generation"),
            update_ways=tuple(ways),
            has_brackets=await _has(engine, "/begin_weight_update"),
        )
    except ClientError as error:
        return Unanswered(url=engine.url, text=str(error))


async def _has(engine: Engine, path: str) -> bool:
    """Whether a path is known, by a method that does nothing on it."""
    try:
        await engine.call("OPTIONS", path)
    except ControlRefused as error:
        return error.status == _WRONG_METHOD
    return True


async def answer(url: str, input_ids: TokenIds, sampling: dict[str, Any], limit_s: float) -> Completion:
    """One answer to one prompt.

    Raises:
        ControlFailed: none came in time.
        InvalidReply: it breaks a rule of truth.
    """
    policy = FailurePolicy()
    body = generate_body(WireIds().make("doctor"), input_ids, sampling, options={})
    try:
        async with open_session(policy) as session, asyncio.timeout(limit_s):
            engine = Engine(engine_url(url), session, policy)
            limit = answer_limit(input_ids, sampling, {})
            return decode_reply(await engine.generate(body, None, limit), engine=engine.url)
    except (HttpFailure, ServerVerdict) as error:
        raise ControlFailed(f"{url} must answer a prompt, found {error}") from error
    except TimeoutError as error:
        raise ControlFailed(f"{url} must answer a prompt, found silence for {limit_s:g} s") from error


def text_of(completion: Completion) -> str | None:
    """What the engine itself makes of the tokens; None where it has no tokenizer."""
    tree = msgspec.json.decode(completion.rest)
    text = tree.get("text") if isinstance(tree, dict) else None
    return text if isinstance(text, str) else None
