"""Builds a record's extra columns from the `extras` of its samples. Pure.

Invariant: every sample has the number of rows that the column's `per` requires, in values that fit the
column's type; otherwise the group is refused, naming the column. Only a column of items may be empty, and
only a sample that is not trained may lack an array, which is then zeros.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_rollout.generator.base.errors import SampleRefused
from fa_rollout.sample import Sample
from trainer_hook.record import ExtraColumn

Arrays = dict[str, npt.NDArray[Any]]

ROUTED_EXPERTS = "routed_experts"
"""The column that engines fill: experts by layer, of each token that went through the model."""

_HINTS = {
    ROUTED_EXPERTS: "engines tell them when they run with --enable-return-routed-experts, and not behind "
    "SGLang's own router",
    "token_rewards": "the reward function must return them in its dict",
}


def extended(known: Arrays, further: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Rows of all tokens so far, after an answer that also returned rows for its prompt.

    Rows of earlier tokens are kept: they are the ones used when these tokens were sampled.
    """
    return {
        name: np.concatenate([known[name], rows[len(known[name]) :]]) if name in known else rows
        for name, rows in further.items()
    }


def extra_pieces(
    samples: Sequence[Sample], columns: Sequence[ExtraColumn]
) -> dict[str, list[npt.NDArray[Any]]]:
    """By column name: one piece per sample, or the offsets of a column of items.

    Raises:
        SampleRefused: an array is missing, of another shape, or beyond its column's type.
    """
    pieces: dict[str, list[npt.NDArray[Any]]] = {}
    for column in columns:
        arrays = pieces[column.name] = [_rows(sample, column) for sample in samples]
        if column.per == "item":
            pieces[f"cu_{column.name}"] = [np.cumsum([0, *map(len, arrays)])]
    return pieces


def _rows(sample: Sample, column: ExtraColumn) -> npt.NDArray[Any]:
    found = sample.extras.get(column.name)
    if found is None:
        if column.per == "item":
            return np.empty((0, *column.shape), column.dtype)
        if sample.is_excluded:
            return np.zeros((_num_rows(sample, column, np.empty(0)), *column.shape), column.dtype)
        hint = _HINTS.get(column.name, "set sample.extras in the custom generate function")
        raise SampleRefused(f"{column.name}: must be there for every sample, found none: {hint}")
    array = np.asarray(found)
    shape = (_num_rows(sample, column, array), *column.shape)
    # An engine tells the rest of the shape flat; rows must be rows all the same.
    if array.size != np.prod(shape) or (column.per != "sample" and array.shape[:1] != shape[:1]):
        raise SampleRefused(f"{column.name}: must be of shape {shape}, found {array.shape}")
    return _cast(array.reshape(shape), column)


def _num_rows(sample: Sample, column: ExtraColumn, array: npt.NDArray[Any]) -> int:
    num_tokens = len(sample.prompt_ids) + len(sample.response_ids)
    match column.per:
        case "token":
            return num_tokens
        case "input_token":
            return num_tokens - 1
        case "response_token":
            return len(sample.response_ids)
        case "item":
            return len(array) if array.ndim else 0
        case _:
            return 1


def _cast(array: npt.NDArray[Any], column: ExtraColumn) -> npt.NDArray[Any]:
    """Values in the column's type: finite for floats, unchanged for integers."""
    wanted = np.dtype(column.dtype)
    is_float = wanted.kind == "f"
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(wanted, copy=False)
    if is_float:
        is_true = array.dtype.kind in "fiub" and bool(np.isfinite(cast).all())
    else:
        is_true = array.dtype == wanted or (array.dtype.kind in "iub" and bool((cast == array).all()))
    if not is_true:
        raise SampleRefused(f"{column.name}: must be finite values that fit {wanted}, found {array!r:.200}")
    return cast
