"""The tokens and log-probabilities of the scripted engine: pure functions that any checker can call.

The token at an absolute position of a sequence (prompt included) depends on the sequence's key and on that
position; its log-probability depends on the weight version's label as well. A sample that was aborted and
continued is therefore checked like any other, and a wrong version, a shifted list or a mixed-up sample shows.

All values repeat after `PERIOD` positions, so that the server cuts its answers from text rendered once.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

PERIOD = 16384
KEY_TOKENS = 16
"""How many of the first prompt ids make a sequence's key."""
EOS_ID = 1
FIRST_ID = 3
"""Ids below it are special tokens of `tiny_model`; none comes up but `EOS_ID` at the end of an answer."""


def sequence_key(prompt_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> int:
    """The key of every sequence that begins with these ids."""
    return zlib.crc32(np.asarray(prompt_ids[:KEY_TOKENS], "<i4").tobytes())


def expected_ids(key: int, start: int, stop: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Token ids at the absolute positions [start, stop)."""
    return tokens_table(vocab_size)[_places(key, start, stop)]


def expected_logprobs(key: int, start: int, stop: int, label: str) -> npt.NDArray[np.float32]:
    """Their log-probabilities under the weight version of this label."""
    return logprobs_table()[(_places(key, start, stop) + version_shift(label)) % PERIOD]


def expected_experts(num_rows: int, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """[rows, layers, experts of a token] of the first tokens of any sequence."""
    layers, per_token = shape
    rows = np.arange(num_rows, dtype=np.int32)[:, None, None]
    experts = 7 * rows + 3 * np.arange(layers)[:, None] + np.arange(per_token)
    return (experts % 128).astype(np.int32)


def expected_kept(
    key: int, start: int, stop: int, vocab_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(ids, offsets) of the nucleus that each token at [start, stop) was sampled from: one to three ids."""
    sizes = 1 + np.arange(start, stop) % 3
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    ids = np.repeat(expected_ids(key, start, stop, vocab_size), sizes)
    return ids + (np.arange(len(ids)) - np.repeat(offsets[:-1], sizes)).astype(np.int32), offsets


def ids_of_text(text: str, vocab_size: int) -> list[int]:
    """Ids of a prompt that comes as text: one for each byte."""
    return [FIRST_ID + byte % (vocab_size - FIRST_ID) for byte in text.encode()]


def place(key: int, position: int) -> int:
    """Where in the tables an absolute position of a sequence is found."""
    return (key + position) % PERIOD


def version_shift(label: str) -> int:
    """How far a version shifts the log-probabilities."""
    return zlib.crc32(label.encode()) % PERIOD


@lru_cache(maxsize=4)
def tokens_table(vocab_size: int) -> npt.NDArray[np.int32]:
    """[PERIOD] ids in [FIRST_ID, vocab_size)."""
    return (FIRST_ID + _noise(1) % np.uint64(vocab_size - FIRST_ID)).astype(np.int32)


@lru_cache(maxsize=1)
def logprobs_table() -> npt.NDArray[np.float32]:
    """[PERIOD] values in (-8, 0]."""
    return -(_noise(2) % np.uint64(1 << 20)).astype(np.float32) / np.float32(1 << 17)


def _places(key: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    return (key + np.arange(start, stop, dtype=np.int64)) % PERIOD


def _noise(stream: int) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014): the same on every machine and numpy."""
    with np.errstate(over="ignore"):
        z = (np.arange(PERIOD, dtype=np.uint64) + np.uint64(stream << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
