"""A run on a virtual clock: `Flow` decides as in a real run, SimPy processes model engines and trainer.

In: a `Scenario`. Out: an `Outcome` with step time, trainer idle, staleness and lengths.
What is modelled: one decode rate per request, a number of request slots, pauses of all engines at an update,
resume or restart of what an update aborts, a share of groups that a filter rejects. What is not: prefill,
batch-size dependence of the rate, HTTP and Python time.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from fa_rollout.config import from_dict
from fa_rollout.hub.composition import Wait
from fa_rollout.hub.flow import Flow, Step
from fa_rollout.hub.stream import Stream
from shm.ring import RingTable
from trainer_hook.messages import Assignment, Commit, Settled, Settlement

Process = Generator[simpy.Event, Any, None]
CANCELLED = "cancelled"
RECORD_BYTES = 4096
VAST_RING_BYTES = 1 << 40


def lognormal_lengths(median: float, sigma: float, low: int, high: int) -> Callable[[random.Random], int]:
    """Response lengths in tokens: lognormal, clipped to [low, high]."""
    return lambda rng: int(min(high, max(low, rng.lognormvariate(np.log(median), sigma))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulated run depends on."""

    num_steps: int = 60
    groups_per_step: int = 8
    samples_per_group: int = 4
    update_interval: int = 1
    staleness: int = 4
    staleness_policy: str = "wait"
    surplus_groups: int = 0
    partial: str = "resume"
    rejection: float = 0.0
    """Share of finished groups that a filter rejects."""
    lengths: Callable[[random.Random], int] = field(
        default_factory=lambda: lognormal_lengths(1500, 0.8, 64, 8192)
    )
    """Draws a response length in tokens."""
    tokens_per_s: float = 1500.0
    """Decode rate of one request."""
    num_slots: int = 32
    """Requests that all engines serve at once."""
    train_s: float = 1.0
    update_s: float = 0.05
    """Time that engines stand still for an update."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What a simulated run showed."""

    step_s: list[float] = field(default_factory=list)
    """Time from one step's end to the next."""
    wait_s: list[float] = field(default_factory=list)
    """Time that the trainer waited for each step's batch."""
    staleness: list[int] = field(default_factory=list)
    """Of each trained group."""
    trained_lengths: list[int] = field(default_factory=list)
    drawn_lengths: list[int] = field(default_factory=list)
    """Of each group's first sample when it was first started; unbiased training has the same mean."""
    dropped_lengths: list[int] = field(default_factory=list)
    num_rejected: int = 0
    num_restarts: int = 0
    duration_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def trainer_idle(self) -> float:
        """Share of wall time that the trainer waits for data."""
        return sum(self.wait_s) / self.duration_s if self.duration_s else 0.0

    @property
    def mean_step_s(self) -> float:
        """Mean time of a step, the first tenth (filling the pipeline) left out."""
        steady = self.step_s[len(self.step_s) // 10 :]
        return sum(steady) / len(steady)

    @property
    def length_bias(self) -> float:
        """Mean trained length over mean drawn length, minus 1."""
        return float(np.mean(self.trained_lengths) / np.mean(self.drawn_lengths)) - 1.0


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.env = simpy.Environment()
        self.slots = simpy.PriorityResource(self.env, capacity=scenario.num_slots)
        self.outcome = Outcome()
        self.flow = Flow(
            _config(scenario),
            Stream(num_prompts=1 << 20, epochs=None, order=lambda _: np.arange(1 << 20)),
            RingTable(VAST_RING_BYTES),
            lineage="simulated",
        )
        self.flow.table.restart()
        self.lengths: dict[int, list[int]] = {}
        """Per group; a further attempt draws the same lengths, as the same prompt tends to."""
        self.running: set[simpy.Process] = set()
        self.samples: dict[tuple[int, int], list[simpy.Process]] = {}
        """Of each group and attempt that engines have."""
        self.gate = self.env.event()
        self.gate.succeed()
        """Pending while the engines stand still."""
        self.news = self.env.event()
        self.num_committed = 0

    # --- engines ----------------------------------------------------------------------------------

    def issue(self) -> None:
        for assignment in self.flow.issue():
            self.env.process(self.group(assignment))

    def group(self, assignment: Assignment) -> Process:
        name = assignment.group
        if name not in self.lengths:
            drawn = [self.scenario.lengths(self.rng) for _ in range(self.scenario.samples_per_group)]
            self.lengths[name] = drawn
            self.outcome.drawn_lengths.append(sum(drawn))
        oldest: list[int] = []
        samples = [self.env.process(self.sample(assignment, length, oldest)) for length in self.lengths[name]]
        self.samples[name, assignment.attempt] = samples
        yield self.env.all_of(samples)
        if self.samples.pop((name, assignment.attempt), None):
            self.finish(assignment, min(oldest))

    def stop(self) -> None:
        """Cancel what no step can train any more."""
        for name in self.flow.take_hopeless():
            for key in [key for key in self.samples if key[0] == name]:
                self.outcome.dropped_lengths.append(sum(self.lengths[name]))
                for process in self.samples.pop(key):
                    if process.is_alive:
                        process.interrupt(CANCELLED)
                self.flow.settle(
                    Settled(group=name, attempt=key[1], outcome=Settlement.DROPPED, reason="hopeless")
                )

    def sample(self, assignment: Assignment, length: int, oldest: list[int]) -> Process:
        """One request, until it is whole or cancelled."""
        try:
            yield from self.decode(assignment, length, oldest)
        except simpy.Interrupt:
            assert self.env.active_process is not None
            self.running.discard(self.env.active_process)

    def decode(self, assignment: Assignment, length: int, oldest: list[int]) -> Process:
        """A slot, then decoding; an update interrupts it."""
        with self.slots.request(priority=assignment.group) as slot:
            yield slot
            yield self.gate
            self.flow.books.dispatched([assignment.group], self.flow.version)
            version, left_s = self.flow.version, length / self.scenario.tokens_per_s
            me = self.env.active_process
            assert me is not None
            self.running.add(me)
            while left_s > 0:
                begun_s = self.env.now
                try:
                    yield self.env.timeout(left_s)
                    left_s = 0.0
                except simpy.Interrupt as interrupt:
                    if interrupt.cause == CANCELLED:
                        raise
                    left_s -= self.env.now - begun_s
                    yield self.gate
                    if self.scenario.partial == "restart" and left_s > 0:
                        self.outcome.num_restarts += 1
                        version, left_s = self.flow.version, length / self.scenario.tokens_per_s
            self.running.discard(me)
            oldest.append(version)

    def finish(self, assignment: Assignment, oldest: int) -> None:
        name = assignment.group
        if self.rng.random() < self.scenario.rejection:
            self.outcome.num_rejected += 1
            self.flow.settle(
                Settled(group=name, attempt=assignment.attempt, outcome=Settlement.FILTERED, reason="filter")
            )
        else:
            is_taken = self.flow.commit(self.record(assignment, oldest))
            assert is_taken
        self.issue()
        self.wake()

    def record(self, assignment: Assignment, oldest: int) -> Commit:
        position = self.num_committed * RECORD_BYTES
        self.num_committed += 1
        lengths = self.lengths[assignment.group]
        return Commit(
            incarnation=1,
            sequence=self.num_committed,
            position=position,
            length=RECORD_BYTES,
            lowest_open=position + RECORD_BYTES,
            group=assignment.group,
            attempt=assignment.attempt,
            oldest_version=oldest,
            newest_version=self.flow.version,
            prompt_lens=[1] * len(lengths),
            response_lens=lengths,
            loss_lens=lengths,
            spans=[[(oldest, length, length)] for length in lengths],
            rewards=[0.0] * len(lengths),
        )

    def wake(self) -> None:
        news, self.news = self.news, self.env.event()
        news.succeed()

    # --- trainer ----------------------------------------------------------------------------------

    def trainer(self) -> Process:
        scenario, last_end_s = self.scenario, 0.0
        self.issue()
        for number in range(scenario.num_steps):
            asked_s = self.env.now
            step = self.compose()
            while isinstance(step, Wait):
                starved = self.flow.starved()
                if starved:
                    raise RuntimeError(starved)
                yield self.news
                step = self.compose()
            self.outcome.wait_s.append(self.env.now - asked_s)
            self.stop()
            self.issue()
            yield self.env.timeout(scenario.train_s)
            self.flow.trained(step)
            self.book(step)
            if (number + 1) % scenario.update_interval == 0:
                yield from self.update()
            self.outcome.step_s.append(self.env.now - last_end_s)
            last_end_s = self.env.now

    def compose(self) -> Step | Wait:
        known = set(self.flow.books.groups)
        step = self.flow.compose()
        gone = known - set(self.flow.books.groups)
        self.outcome.dropped_lengths.extend(sum(self.lengths[name]) for name in gone)
        if gone or isinstance(step, Step) or self.flow.books.counts().queued:
            self.issue()
        return step

    def book(self, step: Step) -> None:
        self.outcome.staleness.extend(step.version - c.oldest_version for c in step.commits)
        self.outcome.trained_lengths.extend(sum(c.response_lens) for c in step.commits)

    def update(self) -> Process:
        self.gate = self.env.event()
        for process in list(self.running):
            process.interrupt()
        yield self.env.timeout(self.scenario.update_s)
        self.flow.published(self.flow.version + 1)
        self.gate.succeed()
        self.stop()
        self.issue()


def simulate(scenario: Scenario) -> Outcome:
    """Play a scenario to its last step.

    Raises:
        RuntimeError: the flow control stands still for good; the text says who waits for whom.
    """
    run = _Run(scenario)
    trainer = run.env.process(run.trainer())
    run.env.run(until=trainer)
    run.outcome.duration_s = run.env.now
    counts = run.flow.books.counts()
    run.outcome.counts = {name: getattr(counts, name) for name in type(counts).__slots__}
    return run.outcome


def _config(scenario: Scenario) -> Any:
    return from_dict(
        {
            "data": {"path": "simulated"},
            "reward": {"function": "simulated.reward"},
            "engine": {"urls": ["http://simulated"]},
            "ring": {"bytes": VAST_RING_BYTES},
            "rollout": {
                "num_steps": scenario.num_steps,
                "groups_per_step": scenario.groups_per_step,
                "samples_per_group": scenario.samples_per_group,
                "update_interval": scenario.update_interval,
                "staleness": scenario.staleness,
                "staleness_policy": scenario.staleness_policy,
                "partial": scenario.partial,
                "surplus_groups": scenario.surplus_groups,
            },
        }
    )
