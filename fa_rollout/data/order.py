"""The order of prompts in an epoch: a pure function of (number of prompts, seed, epoch).

Nothing is carried from epoch to epoch, so that any position of the endless stream of prompts can be found
again after a restart, however often the data has wrapped around.
"""

import numpy as np
import numpy.typing as npt


def epoch_order(num_prompts: int, epoch: int, *, seed: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Row index of each position of an epoch, [num_prompts].

    The permutation sorts raw draws of a Philox generator keyed by (seed, epoch): numpy promises that raw
    streams never change, and makes no such promise for `Generator.permutation`.
    """
    if not shuffle:
        return np.arange(num_prompts, dtype=np.int64)
    key = np.random.SeedSequence([seed % 2**64, epoch])
    draws = np.random.Philox(key).random_raw(num_prompts)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)
