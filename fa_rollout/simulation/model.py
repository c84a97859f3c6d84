"""A run on a virtual clock: `Flow` decides as in a real run, modelled engines and a modelled trainer obey.

In: a `Scenario`. Out: a `SimulationOutcome`. Admission, composition, books and ageing are the hub's code.
"""

import random
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import simpy

from fa_rollout.hub.flow.composition import BatchWait
from fa_rollout.hub.flow.flow import Flow, Step
from fa_rollout.hub.flow.stream import Stream
from fa_rollout.simulation.engines import SimulatedEngines, SimulatedRequest
from fa_rollout.simulation.outcome import SimulationOutcome
from fa_rollout.simulation.scenario import VAST_RING_BYTES, Scenario
from shm import RingTable
from trainer_hook.messages import Assignment, Commit, Settled, Settlement

Process = Generator[simpy.Event, Any, None]
_NUM_PROMPTS = 1 << 20
_ALIGNMENT = 64
_HEADER_BYTES = 1024


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.env = simpy.Environment()
        self.engines = SimulatedEngines(self.env, scenario, started=self.started, done=self.done)
        self.outcome = SimulationOutcome()
        self.flow = Flow(
            scenario.config(),
            Stream(num_prompts=_NUM_PROMPTS, epochs=None, order=lambda _: np.arange(_NUM_PROMPTS)),
            RingTable(VAST_RING_BYTES),
            lineage="simulated",
        )
        self.flow.table.restart()
        self.lengths: dict[int, list[int]] = {}
        """Per group; a further attempt has the same, as the same prompt tends to."""
        self.samples: dict[tuple[int, int], list[SimulatedRequest]] = {}
        """Of each group and attempt that engines have."""
        self.news = self.env.event()
        self.num_committed = self.ring_position = 0

    # --- generator --------------------------------------------------------------------------------

    def issue(self) -> None:
        for assignment in self.flow.issue():
            self.begin(assignment)

    def begin(self, assignment: Assignment) -> None:
        name, attempt = assignment.group, assignment.attempt
        if name not in self.lengths:
            self.lengths[name] = self.scenario.lengths(self.rng, name, self.scenario.samples_per_group)
            self.outcome.drawn_lengths.append(sum(self.lengths[name]))
        requests = [
            SimulatedRequest(group=name, attempt=attempt, length=length) for length in self.lengths[name]
        ]
        self.samples[name, attempt] = requests
        for request in requests:
            self.engines.submit(request)

    def started(self, request: SimulatedRequest) -> None:
        self.flow.books.dispatched([request.group], self.flow.version)
        request.version = self.flow.version

    def done(self, request: SimulatedRequest) -> None:
        key = request.group, request.attempt
        if all(other.is_over for other in self.samples[key]):
            oldest = min(other.version for other in self.samples.pop(key))
            scored = self.env.timeout(self.scenario.reward_s)
            assert scored.callbacks is not None
            scored.callbacks.append(partial(self.finish, key, oldest))

    def finish(self, key: tuple[int, int], oldest: int, event: simpy.Event) -> None:
        name, attempt = key
        if self.rng.random() < self.scenario.rejection:
            self.settle(name, attempt, Settlement.FILTERED)
        else:
            self.flow.commit(self.record(name, attempt, oldest))
        self.issue()
        news, self.news = self.news, self.env.event()
        news.succeed()

    def stop(self) -> None:
        """Cancel groups that no step can train."""
        for name in self.flow.take_hopeless():
            for key in [key for key in self.samples if key[0] == name]:
                self.outcome.dropped_lengths.append(sum(self.lengths[name]))
                for request in self.samples.pop(key):
                    self.engines.cancel(request)
                self.settle(name, key[1], Settlement.DROPPED)

    def settle(self, name: int, attempt: int, outcome: Settlement) -> None:
        self.flow.settle(Settled(group=name, attempt=attempt, outcome=outcome, reason="simulated"))

    def record(self, name: int, attempt: int, oldest: int) -> Commit:
        lengths, prompt = self.lengths[name], self.scenario.prompt_tokens
        num_bytes = _HEADER_BYTES + sum(4 * (prompt + length) + 5 * length for length in lengths)
        position, num_bytes = self.ring_position, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.ring_position += num_bytes
        self.num_committed += 1
        return Commit(
            incarnation=1,
            sequence=self.num_committed,
            position=position,
            length=num_bytes,
            lowest_open=self.ring_position,
            group=name,
            attempt=attempt,
            oldest_version=oldest,
            newest_version=self.flow.version,
            prompt_lens=[prompt] * len(lengths),
            response_lens=lengths,
            loss_lens=lengths,
            spans=[[(oldest, length, length)] for length in lengths],
            rewards=[0.0] * len(lengths),
        )

    # --- trainer ----------------------------------------------------------------------------------

    def trainer(self) -> Process:
        scenario, last_end_s = self.scenario, 0.0
        self.issue()
        for number in range(scenario.num_steps):
            asked_s = self.env.now
            step = self.compose()
            while isinstance(step, BatchWait):
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

    def compose(self) -> Step | BatchWait:
        known = set(self.flow.books.groups)
        step = self.flow.compose()
        gone = known - set(self.flow.books.groups)
        self.outcome.dropped_lengths.extend(sum(self.lengths[name]) for name in gone)
        if gone or isinstance(step, Step) or self.flow.books.counts().queued:
            self.issue()
        return step

    def book(self, step: Step) -> None:
        lengths = [sum(commit.response_lens) for commit in step.commits]
        self.outcome.staleness.extend(step.version - commit.oldest_version for commit in step.commits)
        self.outcome.trained_lengths.extend(lengths)
        self.outcome.step_tokens.append(sum(lengths))

    def update(self) -> Process:
        yield self.env.timeout(self.scenario.write_s)
        self.engines.pause()
        yield self.env.timeout(self.scenario.update_s)
        self.flow.published(self.flow.version + 1)
        again = self.engines.resume(restart=self.scenario.partial == "restart")
        self.outcome.num_restarts += len(again)
        for request in again:
            request.version = self.flow.version
        self.stop()
        self.issue()


def simulate(scenario: Scenario) -> SimulationOutcome:
    """Play a scenario to its last step.

    Raises:
        RuntimeError: the flow control is deadlocked; the text says who waits for whom.
    """
    run = _Run(scenario)
    trainer = run.env.process(run.trainer())
    run.env.run(until=trainer)
    outcome, duration_s = run.outcome, run.env.now
    outcome.duration_s = duration_s
    num_slots = scenario.num_engines * scenario.num_slots
    outcome.utilisation = run.engines.busy_slot_s / (num_slots * duration_s) if duration_s else 0.0
    counts = run.flow.books.counts()
    outcome.counts = {name: getattr(counts, name) for name in type(counts).__slots__}
    return outcome
