"""Checkpoint of the prompts that slime's own omits: taken from the data source and not trained yet.

Written at the end of each call of the rollout function, next to slime's state of the data source, and read by
the first call after a restart. `train_async` saves step k after the call for k + 1, `train.py` before it; the
position of the data source that slime has loaded shows which:

| the data source is at its position at the end of | undelivered prompts |
|---|---|
| the call for k + 1, made before the restart | those it left over, and those it delivered |
| the call for k | those it left over |

Invariant: a file is complete or absent; only files in this run's own folder are read.
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
"""The latest files are kept even if they match no state of slime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCheckpoint:
    """The prompts of one call."""

    position: Position
    """Of the data source at the end of the call."""
    delivered: list[bytes]
    """Pickled groups, as taken from the data source."""
    outstanding: list[bytes]
    lineage: str
    """Of the weight versions; slime counts them from 1 again after a restart."""


def position_of(data_source: Any) -> Position:
    """Position of a data source, by slime's counters; all None for other sources."""
    return tuple(getattr(data_source, name, None) for name in _FIELDS)


def write(save: str, rollout_id: int, checkpoint: PromptCheckpoint) -> None:
    """Write the prompt checkpoint of a call, and remove those that match no state of slime."""
    folder = Path(save, "rollout")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _name(rollout_id, checkpoint.position)
    draft = path.with_suffix(f".{os.getpid()}")
    fields = (checkpoint.position, checkpoint.delivered, checkpoint.outstanding, checkpoint.lineage)
    draft.write_bytes(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
    draft.replace(path)
    _prune(folder, rollout_id)


def undelivered(load: str | None, rollout_id: int, position: Position) -> list[bytes]:
    """Groups that the first call after a restart, for `rollout_id`, must deliver again."""
    if load is None or rollout_id == 0:
        return []
    now, before = (_read(load, number, position) for number in (rollout_id, rollout_id - 1))
    if now is not None:
        return [*now.delivered, *now.outstanding]
    if before is not None:
        return before.outstanding
    if any(Path(load, "rollout").glob("fa_rollout_*.pkl")):
        logger.warning(
            "no fa_rollout_*.pkl in %s/rollout matches the data source's position %s (rollout %d): prompts "
            "that were in progress at the checkpoint are not repeated",
            load,
            position,
            rollout_id,
        )
    return []


def _name(rollout_id: int, position: Position) -> str:
    """Includes the position, so that runs resumed from one checkpoint do not replace each other's file."""
    return f"fa_rollout_{rollout_id}.{zlib.crc32(repr(position).encode()):08x}.pkl"


def _read(load: str, rollout_id: int, position: Position) -> PromptCheckpoint | None:
    path = Path(load, "rollout", _name(rollout_id, position))
    if not path.exists():
        return None
    found, delivered, outstanding, lineage = pickle.loads(path.read_bytes())
    assert found == position, "a file's name is made of its position"
    return PromptCheckpoint(position=found, delivered=delivered, outstanding=outstanding, lineage=lineage)


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
    """The states of slime that a prompt checkpoint may belong to."""
    return number - 1, number
