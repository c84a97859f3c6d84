"""Rebuilds slime's samples from a group's record in the ring and its other attributes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_rollout.slime.wire import decode_rest, regroup
from trainer_hook.batches.sample import Sample


def rebuild(rest: bytes, records: Sequence[Sample], *, arrays: bool) -> list[Any]:
    """A group as slime's functions returned it in the generator: samples, or lists of samples for a fan-out.

    Args:
        rest: the payload of the group's commit.
        records: the group's samples in the ring.
        arrays: fill numpy arrays (int64, float32) for tokens and log-probabilities in place of lists.
    """
    shape, samples = decode_rest(rest)
    for record in records:
        _fill(samples[record.member], record, arrays=arrays)
    return regroup(shape, samples)


def _fill(sample: Any, record: Sample, *, arrays: bool) -> None:
    columns = record.arrays
    state = vars(sample)
    if arrays:
        state.setdefault("tokens", columns.tokens.astype(np.int64))
        state.setdefault("rollout_log_probs", columns.logprobs.copy())
    else:
        state.setdefault("tokens", columns.tokens.tolist())
        state.setdefault("rollout_log_probs", columns.logprobs.tolist())
    # Always a list: slime's metrics add masks up with `sum`, which is ten times slower on an array.
    if "loss_mask" not in state:
        mask = columns.loss_mask
        state["loss_mask"] = [1] * len(mask) if mask.all() else mask.tolist()
