"""Kills and stops at random moments, until a job is trained and the storm has spent itself.

Invariant: all that is signalled was started by the storm's own launches or engines, by pid; whatever ends a
launch, nothing of it is left `LEFTOVER_S` later, and the next one goes on from the checkpoint.
"""

import contextlib
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from tests.chaos.job import Job, Launch

LEFTOVER_S = 15.0
"""From a launcher's end to the end of all that it started; most of it is for a busy machine."""
LAUNCH_S = 240.0
EXIT_CODES = {0, 70, 137, 143}
"""Ways for a launch to end in a storm."""

WEIGHTS = {
    "generator": 6,
    "engine": 4,
    "rank": 4,
    "hub": 2,
    "launcher": 2,
    "agent": 1,
    "reward worker": 4,
}
STOPPED = ("generator", "engine", "rank", "hub", "launcher")
STOP_S = (0.1, 1.5)
PAUSE_S = (0.05, 1.2)


class StormFailed(AssertionError):
    """Something did not end, or ended in a way that it must not."""


@dataclass(slots=True, kw_only=True)
class Account:
    """What a storm did."""

    struck: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    untrained: Counter[str] = field(default_factory=Counter)
    """Why groups ended that were not trained."""
    num_launches: int = 0

    @property
    def num_kills(self) -> int:
        return sum(number for name, number in self.struck.items() if "KILL" in name)


class Storm:
    """Strikes one job."""

    def __init__(self, job: Job, *, seed: int, num_strikes: int) -> None:
        self.job = job
        self.account = Account()
        self._dice = random.Random(seed)
        self._left = num_strikes
        self._stopped: list[tuple[float, psutil.Process]] = []
        """When to continue whom."""

    def run(self) -> Account:
        """Launch until the job is trained.

        Raises:
            StormFailed: a launch hung, left something, or ended in no way known.
        """
        while not self.job.is_trained:
            self.account.num_launches += 1
            launch = Launch(self.job)
            try:
                self._weather(launch)
                self._ended(launch)
            finally:
                self._continue_all()
                launch.destroy()
        return self.account

    def _weather(self, launch: Launch) -> None:
        deadline_s = time.monotonic() + LAUNCH_S
        next_s = time.monotonic() + self._dice.uniform(0.5, 4.0)
        while launch.process.poll() is None:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise StormFailed(f"a launch must end within {LAUNCH_S:.0f} s; alive: {launch.left()}")
            self._continue_due(now_s)
            self.job.revive_engines()
            if self._left > 0 and now_s >= next_s:
                self._strike(launch)
                next_s = now_s + self._dice.uniform(*PAUSE_S)
            launch.look()
            time.sleep(0.02)

    def _strike(self, launch: Launch) -> None:
        part = self._dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        targets = self._targets(part, launch)
        if not targets:
            return
        target = self._dice.choice(targets)
        stops = part in STOPPED and self._dice.random() < 0.25
        terms = part == "launcher" and not stops and self._dice.random() < 0.5
        signum = signal.SIGSTOP if stops else signal.SIGTERM if terms else signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(signum)
            self._left -= 1
            self.account.struck[f"{part} {signum.name}"] += 1
        if stops:
            # One generator in two stays stopped for longer than its heartbeat allows.
            long_s = 4.0 if part == "generator" and self._dice.random() < 0.5 else 0.0
            self._stopped.append((time.monotonic() + self._dice.uniform(*STOP_S) + long_s, target))

    def _targets(self, part: str, launch: Launch) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if part == "launcher":
                return [psutil.Process(launch.process.pid)]
            if part == "engine":
                return [psutil.Process(engine.process.pid) for engine in self.job.engines]
            return launch.find(part)
        return []

    def _continue_due(self, now_s: float) -> None:
        due = [entry for entry in self._stopped if entry[0] <= now_s]
        for entry in due:
            self._stopped.remove(entry)
            with contextlib.suppress(psutil.NoSuchProcess):
                entry[1].send_signal(signal.SIGCONT)

    def _continue_all(self) -> None:
        self._continue_due(float("inf"))

    def _ended(self, launch: Launch) -> None:
        """A launch is over: its exit code is known, and nothing of it is left."""
        code = launch.process.wait()
        code = 128 - code if code < 0 else code
        self.account.exits[code] += 1
        if code not in EXIT_CODES:
            raise StormFailed(f"a launch must end in one of {EXIT_CODES}, found {code}")
        deadline_s = time.monotonic() + LEFTOVER_S
        while left := launch.left():
            self._continue_due(time.monotonic())
            if time.monotonic() > deadline_s:
                raise StormFailed(f"nothing may outlive a launch for {LEFTOVER_S:.0f} s; alive: {left}")
            time.sleep(0.05)
