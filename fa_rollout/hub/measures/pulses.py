"""The generator as the hub sees it: whether one is up, its last report, and what the last half minute's show.

In: pulses, once a second. Out: means over the window, sums over all lives of the generator.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from fa_rollout.hub.measures.saturation import engine_rates
from trainer_hook.messages import EnginesChanged, Pulse

WINDOW_S = 30.0
Total = Literal["tokens", "requests", "aborts", "restarts", "discarded_tokens"]

FAILING_S = 2.0
"""An engine that has answered nothing but errors for so long counts as failing."""


class Pulses:
    """All lives of one run's generator."""

    def __init__(self) -> None:
        self.is_up = False
        """A generator lives that can take groups: what is sent to none would be lost."""
        self.down_since_s = time.monotonic()
        """Where none is up."""
        self.last: Pulse | None = None
        """None while no generator lives, and before its first."""
        self.concurrency = 0
        """Samples that the engines take at once; evaluations have slots beside them."""
        self._window: deque[tuple[float, Pulse]] = deque()
        self._earlier: dict[Total, int] = {}
        """Sums of the lives that have ended."""
        self._ring_full_since_s: float | None = None
        self._out_since_s: dict[str, float] = {}
        """By address: engines that get no requests."""

    def begin_life(self, concurrency: int) -> None:
        """A generator is up."""
        self.is_up, self.concurrency = True, concurrency

    def engines_changed(self, message: EnginesChanged) -> None:
        """Engines have come or gone since the last report."""
        self.concurrency = message.concurrency
        if self.last is not None:
            self.last = msgspec.structs.replace(self.last, engines=message.figures)

    def add(self, pulse: Pulse, now_s: float) -> None:
        """The generator has reported."""
        self.last = pulse
        self._window.append((now_s, pulse))
        out = [engine.url for engine in pulse.engines if engine.is_out]
        self._out_since_s = {url: self._out_since_s.get(url, now_s) for url in out}
        if not pulse.num_waiting_for_ring:
            self._ring_full_since_s = None
        elif self._ring_full_since_s is None:
            self._ring_full_since_s = now_s
        while now_s - self._window[0][0] > WINDOW_S:
            self._window.popleft()

    def end_life(self, now_s: float) -> None:
        """This life is over: the next counts from 0 again."""
        self.is_up, self.down_since_s, self.last = False, now_s, None
        if self._window:
            self._earlier = {name: self.total(name) for name in get_args(Total)}
        self._window.clear()
        self._out_since_s.clear()
        self._ring_full_since_s = None

    def age_s(self, now_s: float) -> float | None:
        """Since the last report of the present life; None before its first."""
        return now_s - self._window[-1][0] if self._window else None

    def ring_full_s(self, now_s: float) -> float:
        """For how long finished groups have been waiting for room."""
        return 0.0 if self._ring_full_since_s is None else now_s - self._ring_full_since_s

    def out_s(self, url: str, now_s: float) -> float:
        """For how long an engine has been getting no requests, as far as this life of the generator knows."""
        return now_s - self._out_since_s.get(url, now_s)

    def total(self, name: Total) -> int:
        """Over all lives."""
        now: int = getattr(self._window[-1][1], name) if self._window else 0
        return self._earlier.get(name, 0) + now

    @property
    def load(self) -> float | None:
        """Share of the engines' slots in use, mean of the window; None where nobody tells."""
        shares = [
            min(1.0, sum(engine.in_flight for engine in pulse.engines) / slots)
            for _, pulse in self._window
            if (slots := min(self.concurrency, sum(engine.allowed for engine in pulse.engines)))
        ]
        return sum(shares) / len(shares) if shares else None

    @property
    def busy(self) -> float | None:
        """Share of what the engines can do, mean of the window: measured where their answers' speeds tell it,
        else the share of their slots in use."""
        shares = []
        for _, pulse in self._window:
            rates = [engine_rates(engine) for engine in pulse.engines if not engine.is_out]
            known = [rate for rate in rates if rate is not None]
            if known and len(known) == len(rates):
                shares.append(sum(now for now, _ in known) / sum(most for _, most in known))
        return sum(shares) / len(shares) if shares else self.load

    @property
    def tokens_per_s(self) -> float:
        """Mean of the window."""
        return self._rate(lambda pulse: pulse.tokens)

    def engine_tokens_per_s(self, url: str) -> float:
        """Of one engine, mean of the window."""
        return self._rate(lambda pulse: next((e.num_tokens for e in pulse.engines if e.url == url), 0))

    def _rate(self, total: Callable[[Pulse], float]) -> float:
        if len(self._window) < 2:
            return self._window[0][1].tokens_per_s if self._window else 0.0
        (first_s, first), (last_s, last) = self._window[0], self._window[-1]
        return max(0.0, total(last) - total(first)) / (last_s - first_s)
