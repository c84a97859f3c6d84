"""What the flow measures of finished groups: sizes for admission, failures for the stop, sums for people."""

from collections import deque
from dataclasses import dataclass, field

from shm.errors import FaRolloutError

NUM_JUDGED = 64
"""Last groups by which the rate of failures is judged."""
NUM_AVERAGED = 256
"""Records that the mean size is about; lengths drift while a policy learns."""


class TooManyFailures(FaRolloutError, RuntimeError):
    """The share of failed groups passed the configured rate; the text names the last cause."""


@dataclass(slots=True, kw_only=True)
class Meter:
    """Running figures of one run."""

    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=NUM_JUDGED))
    """True for a record, False for a failure."""
    mean_record_bytes: float = 0.0
    num_records: int = 0
    num_refused: int = 0
    trained_tokens: int = 0
    dropped_tokens: float = 0.0

    def committed(self, num_bytes: int) -> None:
        """A group became a record."""
        self.num_records += 1
        self.mean_record_bytes += (num_bytes - self.mean_record_bytes) / min(self.num_records, NUM_AVERAGED)
        self.outcomes.append(True)

    def failed(self, max_rate: float, cause: str) -> None:
        """A group failed.

        Raises:
            TooManyFailures: more than `max_rate` of the last groups did.
        """
        self.outcomes.append(False)
        num_failed = self.outcomes.count(False)
        if len(self.outcomes) == NUM_JUDGED and num_failed > max_rate * NUM_JUDGED:
            raise TooManyFailures(
                f"at most {max_rate:.0%} of the last {NUM_JUDGED} groups may fail "
                f"(rollout.max_failure_rate), {num_failed} failed; the last one, {cause}"
            )
