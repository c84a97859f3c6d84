"""Faults at random moments, until a job is trained and the storm has spent itself.

Invariant: all that is signalled was started by the storm's own launches or engines, by pid; whatever ends a
launch, nothing of it is left `LEFTOVER_S` later, and the next one goes on from the checkpoint.

| fault | of | for |
|---|---|---|
| SIGKILL | every process | good; engines and launches are started again |
| SIGTERM | the launcher | good |
| SIGSTOP | every process but the router | 0.1 to 40 s |
| trouble (`trouble`) | an engine; untrue answers come from one at a time | 1 to 8 s |
| full disk | generator, hub | 1 to 4 s: no file of theirs can grow |
| full output | a whole launch | all of it |
"""

import contextlib
import random
import resource
import signal
import time
import urllib.error
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.chaos.job import FULL_OUTPUT, Job, Launch
from tests.chaos.trouble import KINDS
from tests.kit.scripted import Rule

LEFTOVER_S = 15.0
"""From a launcher's end to the end of all that it started; most of it is for a busy machine."""
LAUNCH_S = 400.0
EXIT_CODES = {0, 70, 137, 143}
"""Ways for a launch to end in a storm."""
REFUSED = 2
"""A launch that finds an engine in trouble at its start ends in this way."""

KILLED = {
    "generator": 6,
    "spare": 1,
    "engine": 4,
    "rank": 4,
    "hub": 2,
    "launcher": 3,
    "agent": 1,
    "reward worker": 4,
}
"""How often, for each part."""
STOPPED = {"generator": 4, "spare": 1, "engine": 3, "rank": 3, "hub": 2, "launcher": 1, "reward worker": 2}
STOP_S = ((0.7, 0.1, 1.5), (0.2, 1.5, 8.0), (0.1, 8.0, 40.0))
"""(share, shortest, longest) of the stops."""
FAULTS = {"kill": 8, "stop": 5, "trouble": 8, "full disk": 1}
TROUBLE_S = (1.0, 8.0)
FULL_DISK_S = (1.0, 4.0)
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
    num_samples: int = 0
    has_whole_log: bool = True
    """No fault has kept the hub from writing its log."""

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
        self._due: list[tuple[float, Callable[[], object]]] = []
        """When to do what: the ends of faults that last."""
        self._stopped: set[int] = set()
        self._lying: set[int] = set()
        """Places of engines that give untrue answers."""
        self._num_troubles = 0
        """Since the launch began; those that it found count as well."""

    def run(self) -> Account:
        """Launch until the job is trained.

        Raises:
            StormFailed: a launch hung, left something, or ended in no way known.
        """
        while not self.job.is_trained:
            self.account.num_launches += 1
            has_full_output = self._dice.random() < FULL_OUTPUT
            self.account.struck["launch full output"] += has_full_output
            self._num_troubles = len(self._due)
            self.job.revive_engines(may_be_stale=True)
            launch = Launch(self.job, has_full_output=has_full_output)
            try:
                self._weather(launch)
                self._ended(launch)
            finally:
                self._end_faults(float("inf"))
                launch.destroy()
        return self.account

    def _weather(self, launch: Launch) -> None:
        deadline_s = time.monotonic() + LAUNCH_S
        next_s = time.monotonic() + self._dice.uniform(0.5, 4.0)
        while launch.process.poll() is None:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise StormFailed(f"a launch must end within {LAUNCH_S:.0f} s; alive: {launch.left()}")
            self._end_faults(now_s)
            self.job.revive_engines()
            if self._left > 0 and now_s >= next_s:
                self._left -= self._strike(launch)
                next_s = time.monotonic() + self._dice.uniform(*PAUSE_S)
            launch.look()
            time.sleep(0.02)

    # --- faults -----------------------------------------------------------------------------------

    def _strike(self, launch: Launch) -> bool:
        """One fault; False where its target is not there."""
        match _choose(self._dice, FAULTS):
            case "kill":
                return self._kill(launch)
            case "stop":
                return self._stop(launch)
            case "trouble":
                return self._trouble()
            case _:
                return self._fill_disk(launch)

    def _kill(self, launch: Launch) -> bool:
        part = _choose(self._dice, KILLED)
        signum = signal.SIGTERM if part == "launcher" and self._dice.random() < 0.5 else signal.SIGKILL
        return self._signal(part, launch, signum) is not None

    def _stop(self, launch: Launch) -> bool:
        target = self._signal(_choose(self._dice, STOPPED), launch, signal.SIGSTOP)
        if target is None:
            return False
        (bounds,) = self._dice.choices([s[1:] for s in STOP_S], [s[0] for s in STOP_S])
        self._stopped.add(target.pid)
        self._later(self._dice.uniform(*bounds), lambda: self._continue(target))
        return True

    def _trouble(self) -> bool:
        place = self._dice.randrange(len(self.job.engines))
        kind = self._dice.choice(list(KINDS))
        name = self._dice.choice(list(KINDS[kind]))
        if kind == "lie" and (self.job.has_router or self._lying - {place}):
            return False  # behind a router nobody can tell which worker it was
        if not self._tell(place, KINDS[kind][name]):
            return False
        self._lying |= {place} if kind == "lie" else set()
        self._num_troubles += 1
        self.account.struck[f"engine {kind}: {name}"] += 1
        self._later(self._dice.uniform(*TROUBLE_S), lambda: self._calm(place))
        return True

    def _calm(self, place: int) -> None:
        """Until it has heard, an engine lies on."""
        if self._tell(place, []) or self.job.engines[place].process.poll() is not None:
            self._lying.discard(place)
        else:
            self._later(0.5, lambda: self._calm(place))

    def _fill_disk(self, launch: Launch) -> bool:
        part = self._dice.choice(["generator", "hub"])
        targets = self._targets(part, launch)
        if not targets or not launch.find("rank"):  # by then all memory is there, which the limit is for too
            return False
        target = self._dice.choice(targets)
        try:
            limits = target.rlimit(resource.RLIMIT_FSIZE)
            target.rlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        self.account.struck[f"{part} full disk"] += 1
        self.account.has_whole_log &= part != "hub"
        self._later(self._dice.uniform(*FULL_DISK_S), lambda: self._empty_disk(target, launch, limits))
        return True

    def _empty_disk(self, target: psutil.Process, launch: Launch, limits: tuple[int, int]) -> None:
        """Of the target and of those that it has started meanwhile."""
        launch.look()
        for process in [target, *launch.seen.values()]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.rlimit(resource.RLIMIT_FSIZE)[0] == 4096:
                    process.rlimit(resource.RLIMIT_FSIZE, limits)

    def _tell(self, place: int, rules: list[Rule]) -> bool:
        """Have an engine obey these rules, if it can hear."""
        engine = self.job.engines[place]
        if engine.process.poll() is not None or engine.process.pid in self._stopped:
            return False
        try:
            engine.configure(rules=rules)
        except (urllib.error.URLError, ConnectionError, TimeoutError):  # it died meanwhile
            return False
        return True

    def _signal(self, part: str, launch: Launch, signum: signal.Signals) -> psutil.Process | None:
        targets = self._targets(part, launch)
        if not targets:
            return None
        target = self._dice.choice(targets)
        try:
            target.send_signal(signum)
        except psutil.NoSuchProcess:
            return None
        self.account.struck[f"{part} {signum.name}"] += 1
        return target

    def _targets(self, part: str, launch: Launch) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if part == "launcher":
                return [psutil.Process(launch.process.pid)]
            if part == "engine":
                return [psutil.Process(engine.process.pid) for engine in self.job.engines]
            if part in ("generator", "spare"):
                found = sorted(launch.find("generator"), key=lambda process: process.create_time())
                return found[:1] if part == "generator" else found[1:]
            return launch.find(part)
        return []

    # --- ends of faults ---------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + delay_s, action))

    def _continue(self, target: psutil.Process) -> None:
        self._stopped.discard(target.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(signal.SIGCONT)

    def _end_faults(self, now_s: float) -> None:
        due = [entry for entry in self._due if entry[0] <= now_s]
        for entry in due:
            self._due.remove(entry)
            entry[1]()

    def _ended(self, launch: Launch) -> None:
        """A launch is over: its exit code is known, and nothing of it is left."""
        code = launch.process.wait()
        code = 128 - code if code < 0 else code
        self.account.exits[code] += 1
        if code not in EXIT_CODES and not (code == REFUSED and self._num_troubles):
            raise StormFailed(f"a launch must end in one of {EXIT_CODES}, found {code}")
        deadline_s = time.monotonic() + LEFTOVER_S
        while left := launch.left():
            self._end_faults(float("inf"))
            if time.monotonic() > deadline_s:
                raise StormFailed(f"nothing may outlive a launch for {LEFTOVER_S:.0f} s; alive: {left}")
            time.sleep(0.05)


def _choose(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]
