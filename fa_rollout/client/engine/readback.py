"""Whether an engine holds what it was given, by a few numbers of it: SGLang always reports success.

In: probes of what was pushed. Out: nothing, or the error that says what the engine holds instead. An engine
is asked once, and again after it was given all weights anew. What cannot be asked (no such endpoint, a model
whose weights cannot be read back, a tensor that is sharded) is said once.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fa_rollout.client.base.errors import ControlRefused
from fa_rollout.client.engine.endpoints import Engine
from trainer_hook.messages import Probe

_LOG = logging.getLogger(__name__)
_PATH = "/get_weights_by_name"
_CLOSE = 1e-6
_LIMIT_S = 60.0


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
            if await _is_quantized(engine):
                unread.append(probe.name)
            else:
                raise ControlRefused(_mismatch(engine, probe, rows))
    engine.standing.is_checked = True
    if len(unread) == len(probes):
        _LOG.warning(
            "event=weights_not_read_back endpoint=%s tensors=%s: whether it holds what was pushed could not "
            "be checked; its %s does not tell these weights whole",
            engine.url,
            ", ".join(unread),
            _PATH,
        )


async def _rows(engine: Engine, probe: Probe) -> list[list[float]] | None:
    """The first row, of each data-parallel replica; None where the engine does not tell it."""
    ask = {"name": probe.name, "truncate_size": probe.num_rows}
    try:
        found = list(_flat(await engine.call_any(_PATH, ask, timeout_s=_LIMIT_S)))
    except ControlRefused:
        return None
    return found or None


async def _is_quantized(engine: Engine) -> bool:
    """Whether it holds other numbers than it is given by its own choice."""
    try:
        return (await engine.call("GET", "/server_info")).get("quantization") is not None
    except ControlRefused:
        return False


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
        f"{engine.url} must hold the weights that were pushed, and holds others in {probe.name}: number "
        f"{place} is {row[place]:.7g}, pushed was {values[place]:.7g}; {likely}"
    )
