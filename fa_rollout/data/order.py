"""The order of prompts in an epoch: a pure function of (number of prompts, seed, epoch).

No state is carried between epochs, so that any position in the endless stream of prompts can be recomputed
after a restart.
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
