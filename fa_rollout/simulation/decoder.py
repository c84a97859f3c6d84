"""Decoding as a fluid: all running requests share one progress, so that one timer serves thousands.

`progress` counts the tokens that a request running since the beginning would have. A request that joined at
progress p has made `progress - p` tokens; the next to finish is the top of a heap. Time is given, never read.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False, kw_only=True)
class Decoding:
    """One request of an engine."""

    length: int
    """Output tokens that it will have when nothing interferes."""
    made_before: int = 0
    """Tokens made before it was retracted."""
    joined_at: float | None = None
    """Progress when it began to run; None while it does not."""
    is_over: bool = False


_DecodingT = TypeVar("_DecodingT", bound=Decoding)


class Decoder(Generic[_DecodingT]):
    """The running requests and their common progress."""

    def __init__(self, tokens_per_s: float, total_tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.total_tokens_per_s = total_tokens_per_s
        self.num_running = 0
        self._progress = 0.0
        self._time = 0.0
        self._is_frozen = False
        self._heap: list[tuple[float, int, _DecodingT]] = []
        self._pushes = 0

    def advance(self, now: float) -> None:
        """Bring progress up to now."""
        if not self._is_frozen and self.num_running:
            self._progress += self._rate() * (now - self._time)
        self._time = now

    def join(self, job: _DecodingT) -> None:
        """A request begins to decode."""
        job.joined_at = self._progress
        self.num_running += 1
        self._pushes += 1
        heapq.heappush(self._heap, (self._progress + job.length - job.made_before, self._pushes, job))

    def leave(self, job: _DecodingT) -> None:
        """A request stops decoding; what it has made is kept in `made_before`."""
        if job.joined_at is not None:
            job.made_before = self.made(job)
            job.joined_at = None
            self.num_running -= 1

    def made(self, job: _DecodingT) -> int:
        """Tokens that a request has made."""
        if job.joined_at is None:
            return job.made_before
        return min(job.length, job.made_before + math.floor(self._progress - job.joined_at + 1e-6))

    def freeze(self) -> None:
        """No progress until `thaw`."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Progress again."""
        self._is_frozen = False

    def finished(self) -> list[_DecodingT]:
        """Requests that have all their tokens; they leave."""
        done = []
        while self._heap and (self._is_stale() or self._heap[0][0] <= self._progress + 1e-6):
            _, _, job = heapq.heappop(self._heap)
            if job.joined_at is not None and not job.is_over and self.made(job) >= job.length:
                self.leave(job)
                done.append(job)
        return done

    def next_finish_s(self) -> float | None:
        """Seconds until the next request has all its tokens, None when none will."""
        while self._heap and self._is_stale():
            heapq.heappop(self._heap)
        if not self._heap or self._is_frozen:
            return None
        return max(0.0, (self._heap[0][0] - self._progress) / self._rate())

    def _is_stale(self) -> bool:
        """The top left before its end, or left and joined again under a later entry."""
        end, _, job = self._heap[0]
        return job.joined_at is None or abs(job.joined_at + job.length - job.made_before - end) > 1e-3

    def _rate(self) -> float:
        if self.total_tokens_per_s <= 0:
            return self.tokens_per_s
        shared = self.total_tokens_per_s / max(1, self.num_running)
        return min(self.tokens_per_s, shared) if self.tokens_per_s > 0 else shared
