"""Once a second: the loop is alive, how long it was held up, and the figures of the second.

Invariant: a figure is read where it is kept; nothing is counted here but time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer_hook.messages import Message, Pulse

BEAT_S = 0.05
PULSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Where the generator stands."""

    num_queued: int = 0
    num_running: int = 0
    num_waiting_for_ring: int = 0
    num_tokens: int = 0
    """Sampled so far."""
    others: dict[str, float] = field(default_factory=dict)


class Heart:
    """Beats on the event loop; a late beat is a loop that was held up."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.figures: Callable[[], Figures] = Figures
        """Where the figures come from; all zero until the generator is open."""

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        told_s = last_s = loop.time()
        gap_s, num_tokens = 0.0, 0
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = loop.time()
            gap_s = max(gap_s, now_s - last_s - BEAT_S)
            last_s = now_s
            if now_s - told_s < PULSE_S:
                continue
            figures = self.figures()
            tokens_per_s = (figures.num_tokens - num_tokens) / (now_s - told_s)
            self._send(
                Pulse(
                    num_queued=figures.num_queued,
                    num_running=figures.num_running,
                    num_waiting_for_ring=figures.num_waiting_for_ring,
                    tokens_per_s=tokens_per_s,
                    loop_gap_ms=1000.0 * gap_s,
                    figures=figures.others,
                )
            )
            told_s, gap_s, num_tokens = now_s, 0.0, figures.num_tokens
