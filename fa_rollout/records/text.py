"""A sample as text: prompt, and the answer in pieces of one weight version and one mask each.

In: a sample, a tokenizer. Out: pieces of text. Invariant: the pieces joined are the decoding of all ids at
once, also where a character's bytes are in two tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fa_rollout.records.samples import KeptSample


class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Response tokens [start, end) that are alike."""

    start: int
    end: int
    text: str
    version: int | None
    is_masked: bool


def prompt_text(sample: KeptSample, tokenizer: Decodes) -> str:
    """The prompt as the engines got it."""
    return tokenizer.decode(sample.prompt_ids, skip_special_tokens=False)


def pieces(sample: KeptSample, tokenizer: Decodes) -> list[Piece]:
    """The answer, cut where the version or the mask changes."""
    num_tokens = len(sample.response_ids)
    masked = sample.masked_spans
    edges = {0, num_tokens}
    edges |= {end for _, end in sample.version_spans if end < num_tokens}
    edges |= {edge for span in masked for edge in span}
    bounds = sorted(edges)
    texts = _texts(sample.response_ids, bounds, tokenizer)
    return [
        Piece(
            start=start,
            end=end,
            text=text,
            version=_version_at(sample, start),
            is_masked=any(a <= start < b for a, b in masked),
        )
        for start, end, text in zip(bounds, bounds[1:], texts, strict=False)
    ]


def _version_at(sample: KeptSample, place: int) -> int | None:
    return next((version for version, end in sample.version_spans if place < end), None)


def _texts(ids: npt.NDArray[np.int32], bounds: list[int], tokenizer: Decodes) -> list[str]:
    """Each piece is what it adds to the text so far."""
    done, texts = "", []
    for end in bounds[1:]:
        whole = tokenizer.decode(ids[:end], skip_special_tokens=False)
        if end < len(ids):
            whole = whole.rstrip("\ufffd")  # the first bytes of a character that the next piece completes
        common = len(_common(done, whole))
        texts.append(whole[common:])
        done = whole
    return texts


def _common(a: str, b: str) -> str:
    if b.startswith(a):
        return a
    length = next(i for i, (x, y) in enumerate(zip(a + "\0", b + "\1", strict=False)) if x != y)
    return a[:length]
