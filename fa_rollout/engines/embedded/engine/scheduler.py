"""Who runs: requests wait in order of arrival and are admitted while the KV cache has room for their ends.

Invariant: `running[i]` holds row i of the KV cache, and rows * (longest possible end) stays within the
budget, so that no request ever has to be thrown out for lack of memory.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fa_rollout.engines.embedded.model.request import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much runs at once."""

    context_length: int
    max_running_requests: int
    max_total_tokens: int
    """Budget of the padded KV cache, in tokens; at least `context_length`."""
    max_prefill_tokens: int
    """Padded tokens of one prefill pass, unless a single prompt is longer."""
    max_queued_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Row `source` takes the place of row `target`, which is free now."""

    source: int
    target: int
    request: GenerationRequest


class Scheduler:
    """The waiting queue and the rows in use."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []

    @property
    def num_columns(self) -> int:
        """Columns that the running requests may come to need."""
        return max((request.max_tokens for request in self.running), default=0)

    def admit(self) -> list[GenerationRequest]:
        """Move what fits from the queue to the end of `running`, and return it."""
        first_row = len(self.running)
        num_columns = self.num_columns
        longest = 0
        sequences: set[tuple[int, ...]] = set()
        while self.waiting and len(self.running) < self.limits.max_running_requests:
            request = self.waiting[0]
            num_columns = max(num_columns, request.max_tokens)
            longest = max(longest, request.num_tokens)
            sequences.add((*request.prompt_ids, *request.output_ids))
            does_fit = (
                (len(self.running) + 1) * num_columns <= self.limits.max_total_tokens
                and (len(sequences) == 1 or len(sequences) * longest <= self.limits.max_prefill_tokens)
            )  # fmt: skip
            if not does_fit:
                break
            self.running.append(self.waiting.popleft())
        return self.running[first_row:]

    def remove(self, rows: Iterable[int]) -> list[Move]:
        """Take rows out of `running`; the moves that close the gaps, in the order to be made."""
        moves = []
        for row in sorted(rows, reverse=True):
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                moves.append(Move(source=len(self.running), target=row, request=last))
        return moves

    def retract(self) -> None:
        """Put everything that runs back at the head of the queue, the longest in the system first."""
        self.running.sort(key=lambda request: request.arrived_s)
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
