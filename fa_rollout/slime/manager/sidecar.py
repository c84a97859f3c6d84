"""What slime's checkpoint does not keep: prompts that were taken from the data source and not trained yet.

Written as each call of the rollout function ends, beside slime's own state of the data source, and read by
the first call after a restart. `train_async` saves step k after the call for k + 1 has ended, `train.py`
before; which of the two it was shows in the position of the data source that slime has loaded:

| the data source stands where it stood at the end of | undelivered is |
|---|---|
| the call that is made now (k + 1, before the restart) | what it left over, and what it delivered |
| the call before (k) | what it left over |

Invariant: a file is whole or not there; only files of this run's own folder are read.
"""

import logging
import os
import pickle
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Position = tuple[Any, ...]
_FIELDS = ("epoch_id", "sample_group_index", "sample_index", "sample_offset")
_NAME = re.compile(r"fa_rollout_(\d+)\.[0-9a-f]{8}\.pkl")
_STATE = "global_dataset_state_dict_{}.pt"
_LATEST = 3
"""Sidecars that are kept though no state of slime's belongs to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The prompts of one call."""

    position: Position
    """Of the data source as the call ended."""
    delivered: list[bytes]
    """Pickled groups, as they were taken from the data source."""
    outstanding: list[bytes]
    lineage: str
    """Of the weight versions of that life; slime counts them from 1 again in the next one."""


def position_of(data_source: Any) -> Position:
    """Where a data source stands, by slime's own counters; for other sources all None."""
    return tuple(getattr(data_source, name, None) for name in _FIELDS)


def write(save: str, rollout_id: int, sidecar: Sidecar) -> None:
    """Write the sidecar of a call, and remove those that no state of slime's belongs to any more."""
    folder = Path(save, "rollout")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _name(rollout_id, sidecar.position)
    draft = path.with_suffix(f".{os.getpid()}")
    fields = (sidecar.position, sidecar.delivered, sidecar.outstanding, sidecar.lineage)
    draft.write_bytes(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
    draft.replace(path)
    _prune(folder, rollout_id)


def undelivered(load: str | None, rollout_id: int, position: Position) -> list[bytes]:
    """Groups to be given again by the first call of a life, made for `rollout_id`."""
    if load is None or rollout_id == 0:
        return []
    now, before = (_read(load, number, position) for number in (rollout_id, rollout_id - 1))
    if now is not None:
        return [*now.delivered, *now.outstanding]
    if before is not None:
        return before.outstanding
    if any(Path(load, "rollout").glob("fa_rollout_*.pkl")):
        logger.warning(
            "event=sidecar_unused rollout_id=%d text=%s",
            rollout_id,
            f"the data source stands at {position}, and no fa_rollout_*.pkl in {load}/rollout was written "
            "there: prompts that were under way at the checkpoint are not given again",
        )
    return []


def _name(rollout_id: int, position: Position) -> str:
    """Two lives that resume from one checkpoint must not take the other's file away, so it names both."""
    return f"fa_rollout_{rollout_id}.{zlib.crc32(repr(position).encode()):08x}.pkl"


def _read(load: str, rollout_id: int, position: Position) -> Sidecar | None:
    path = Path(load, "rollout", _name(rollout_id, position))
    if not path.exists():
        return None
    found, delivered, outstanding, lineage = pickle.loads(path.read_bytes())
    assert found == position, "a file's name is made of its position"
    return Sidecar(position=found, delivered=delivered, outstanding=outstanding, lineage=lineage)


def _prune(folder: Path, newest: int) -> None:
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match is None or newest - _LATEST < int(match[1]) <= newest:
            continue
        number = int(match[1])
        has_state = any((folder / _STATE.format(n)).exists() for n in _states(number))
        if not has_state:
            (folder / name).unlink(missing_ok=True)


def _states(number: int) -> Sequence[int]:
    """The states of slime's that a sidecar may belong to."""
    return number - 1, number
