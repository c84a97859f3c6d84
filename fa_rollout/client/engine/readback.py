"""Whether an engine holds what it was given, by a few numbers of it: SGLang always reports success.

In: probes of what was pushed. Out: nothing, or the error that says what the engine holds instead. An engine
is asked once, and again after it was given all weights anew. Where it cannot tell (no such endpoint, a model
whose weights cannot be read back, a tensor that is sharded), its log-probabilities of a short text are
compared with the trainer's, at each score that the trainer sends.
"""

import logging
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.engine.endpoints import Engine
from trainer_hook.messages import Probe, Scored

_LOG = logging.getLogger(__name__)
_PATH = "/get_weights_by_name"
_CLOSE = 1e-6
_LIMIT_S = 60.0
_SCORE_LIMIT_S = 30.0
_APART_FLOAT32, _APART_ROUNDED = 0.02, 0.25
"""Largest mean distance of log-probabilities: of two float32 implementations, and where they round."""
_UNSCORED = (
    "whether it holds what was pushed is not checked. It does not report its weights, and its "
    "log-probabilities can be compared only where rank 0 holds a whole transformers model and pushes that"
)


async def check(engine: Engine, probes: Sequence[Probe]) -> None:
    """See that the engine holds these numbers.

    Raises:
        ControlRefused: it holds others.
        ControlFailed: it does not answer.
    """
    if engine.standing.is_checked or not probes:
        return
    unread = []
    for probe in probes:
        rows = await _rows(engine, probe)
        if rows is None or any(len(row) < len(probe.values["float32"]) for row in rows):
            unread.append(probe.name)
        elif not all(_holds(row, probe) for row in rows):
            if (await _server_info(engine)).get("quantization") is not None:
                unread.append(probe.name)
            else:
                raise ControlRefused(_mismatch(engine, probe, rows))
    engine.standing.is_checked = True
    engine.standing.is_unread = len(unread) == len(probes)
    if engine.standing.is_unread:
        _LOG.warning(
            "event=weights_not_read_back endpoint=%s tensors=%s: its %s does not return these weights whole; "
            "it is asked for log-probabilities instead",
            engine.url,
            ", ".join(unread),
            _PATH,
        )


async def check_score(engine: Engine, scored: Scored | None) -> None:
    """See that an engine which could not be read back finds a text as likely as the trainer does.

    It must run: a request is sent. An engine that does not answer in time is asked at the next score.

    Raises:
        ControlRefused: it does not agree.
    """
    standing = engine.standing
    if not standing.is_unread or standing.is_out:
        return
    found = None if scored is None else await _logprobs(engine, scored.input_ids)
    if scored is None or found is None:
        if not standing.is_told_unscored:
            standing.is_told_unscored = True
            _LOG.warning("event=weights_unchecked endpoint=%s: %s", engine.url, _UNSCORED)
        return
    apart = sum(abs(a - b) for a, b in zip(found, scored.logprobs, strict=True)) / len(found)
    limit = _APART_ROUNDED
    info = await _server_info(engine)
    if scored.is_float32 and info.get("dtype") == "float32":
        limit = _APART_FLOAT32
    if apart > limit and info.get("quantization") is None:
        raise ControlRefused(
            f"{engine.url} must hold the weights that were pushed: its log-probabilities of a fixed text of "
            f"{len(scored.input_ids)} tokens differ from the trainer's by {apart:.3g} on average (limit "
            f"{limit:g}). It reports success for weights whose names it does not know; is engine.model the "
            "model that it serves, and does its SGLang support this model?"
        )


async def _logprobs(engine: Engine, ids: list[int]) -> list[float] | None:
    """Of every token of a text but the first; None where the engine does not report them."""
    ask = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        answer = await engine.call("POST", "/generate", ask, timeout_s=_SCORE_LIMIT_S)
    except ControlFailed as error:
        _LOG.info("event=score_failed error=%s", error)
        return None
    meta = answer.get("meta_info")
    rows = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    try:
        told = [(row[1], row[0]) for row in rows or []]
    except (TypeError, KeyError, IndexError):
        return None
    found = [value for _, value in told[1:]]
    is_whole = [token for token, _ in told] == ids
    return found if is_whole and all(isinstance(v, float | int) and isfinite(v) for v in found) else None


async def _server_info(engine: Engine) -> dict[str, Any]:
    try:
        return await engine.call("GET", "/server_info")
    except ControlFailed:
        return {}


async def _rows(engine: Engine, probe: Probe) -> list[list[float]] | None:
    """The first row, of each data-parallel replica; None where the engine does not tell it."""
    ask = {"name": probe.name, "truncate_size": probe.num_rows}
    try:
        found = list(_flat(await engine.call_any(_PATH, ask, timeout_s=_LIMIT_S)))
    except ControlRefused:
        return None
    return found or None


def _flat(value: Any) -> Iterator[list[float]]:
    """Lists of numbers, however deep they lie."""
    if isinstance(value, list) and value:
        if all(isinstance(entry, int | float) for entry in value):
            yield value
        else:
            for entry in value:
                yield from _flat(entry)


def _holds(row: Sequence[float], probe: Probe) -> bool:
    return any(_is_close(row, values) for values in probe.values.values())


def _is_close(row: Sequence[float], values: Sequence[float]) -> bool:
    return all(a == b or abs(a - b) <= _CLOSE * abs(b) for a, b in zip(row, values, strict=False))


def _mismatch(engine: Engine, probe: Probe, rows: Sequence[Sequence[float]]) -> str:
    row = next(row for row in rows if not _holds(row, probe))
    values = probe.values["float32"]
    place = next(i for i, value in enumerate(values) if not _is_close(row[i : i + 1], [value]))
    if probe.before and _is_close(row, probe.before):
        likely = (
            "these are the weights that it started with: it skipped this name, as SGLang does without a word "
            "with names that it does not know; is engine.model the model that it serves?"
        )
    else:
        likely = (
            "is engine.model the model that it serves, unquantized, and does nobody else give it weights?"
        )
    return (
        f"{engine.url} does not hold the pushed weights: in {probe.name}, number {place} is "
        f"{row[place]:.7g}, but {values[place]:.7g} was pushed; {likely}"
    )
