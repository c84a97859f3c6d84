"""Whether an answer is over, decided from its ids and its sampling parameters alone. Pure.

An engine decides that for what it samples itself in one request, and not for the token that it aborts at, nor
for a stop text that began in an earlier request. So every answer that has been aborted is judged here, by the
rules of SGLang:

| what ends an answer | |
|---|---|
| a token | of the model's own ends or of `stop_token_ids`, unless `ignore_eos`, which disables both |
| a grammar | by the model's end, which it demands once it is complete; also under `ignore_eos` |
| a text | of `stop`, or one that `stop_regex` finds, in the decoding of all ids; special tokens count |
| the length | `max_new_tokens` over all requests |

What ends first counts, and anything else before the length. `min_new_tokens` ends nothing and holds nothing
back: an engine does not sample an end before it, and a text ends an answer all the same.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fa_rollout.generator.turns.sampling import Params, has_grammar, texts_of
from fa_rollout.sample import FinishReason, IntArray

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, slots=True)
class AnswerEnding:
    """Where an answer ends, and why."""

    num_tokens: int
    """The token that ends it included."""
    reason: FinishReason


class Ends:
    """The ends of one model's answers."""

    def __init__(self, eos_ids: Iterable[int] = (), decode: Decode | None = None) -> None:
        """
        Args:
            eos_ids: tokens by which the model itself ends an answer.
            decode: text of ids, special tokens included; without it no text ends an answer here.
        """
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode

    def find(self, ids: IntArray, params: Params, *, seam: int = 0) -> AnswerEnding | None:
        """The end of an answer; None where it is to be continued.

        Args:
            seam: tokens at the start of it that are known to end nothing.
        """
        found = [self._first_token(ids, params, seam), self._first_text(ids, params, seam)]
        end = min((number for number in found if number is not None), default=None)
        limit = max(0, params["max_new_tokens"])
        if end is not None and end <= limit:
            return AnswerEnding(end, FinishReason.STOP)
        return AnswerEnding(limit, FinishReason.LENGTH) if len(ids) >= limit else None

    def _first_token(self, ids: IntArray, params: Params, seam: int) -> int | None:
        ends: set[int] = set()
        if not params.get("ignore_eos"):
            ends.update(ident for ident in params.get("stop_token_ids") or () if ident is not None)
        if not params.get("ignore_eos") or has_grammar(params):
            ends |= self.eos_ids
        places = np.flatnonzero(np.isin(ids[seam:], list(ends)))
        return seam + int(places[0]) + 1 if len(places) else None

    def _first_text(self, ids: IntArray, params: Params, seam: int) -> int | None:
        """Number of tokens up to the one that completes a text."""
        stops, patterns = texts_of(params, "stop"), texts_of(params, "stop_regex")
        if self.decode is None or not (stops or patterns):
            return None

        def holds(num_tokens: int) -> bool:
            assert self.decode is not None
            text = self.decode(ids[:num_tokens])
            return any(stop in text for stop in stops) or any(re.search(p, text) for p in patterns)

        if not holds(len(ids)):
            return None
        without, holding = seam, len(ids)
        while holding - without > 1:
            middle = (without + holding) // 2
            without, holding = (without, middle) if holds(middle) else (middle, holding)
        return holding
