"""A recorded run, to be given out again: which groups made each step, and which rank trained which sample.

In: the event log of a run. Out: per step, what was composed. Pure apart from reading the file.
Invariant: only steps of the branch that was trained last count: a step that is composed again, since it was
given back or a checkpoint was loaded, replaces what it was and all that came after.
"""

from dataclasses import dataclass
from pathlib import Path

from fa_rollout.account import event_file, events
from fa_rollout.config import ConfigError
from fa_rollout.hub.flow import composition
from fa_rollout.hub.flow.books import Books
from trainer_hook.errors import UnsplittableBatch
from trainer_hook.messages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The steps of a recorded run."""

    steps: dict[int, events.StepComposed]
    groups: frozenset[int]
    """All that were trained."""

    def compose(self, step: int, books: Books) -> composition.Close | composition.BatchWait:
        """Close a step with the groups that it had, as soon as all of them are committed."""
        recorded = self.steps.get(step)
        if recorded is None:
            return composition.BatchWait(reason=f"step {step}, which the recorded run does not have")
        missing = [name for name in recorded.groups if not books.is_committed(name)]
        if missing:
            return composition.BatchWait(reason=f"{len(missing)} recorded groups, the first is {missing[0]}")
        return composition.Close(groups=tuple(recorded.groups))

    def obstacle(self, step: int, books: Books) -> str | None:
        """Why a step can never be given out again; None while it can."""
        recorded = self.steps.get(step)
        if recorded is None:
            return f"the recorded run has {len(self.steps)} steps, and step {step} is asked for (run.replay)"
        gone = [name for name in recorded.groups if name < books.cursor and name not in books.groups]
        if gone:
            return (
                f"recorded step {step} needs group {gone[0]}, which ended untrained this time: a replay must "
                "have the data, the filter and the reward of the recorded run"
            )
        return None

    def parts(self, step: int, dp_size: int, samples: set[tuple[int, int]]) -> list[list[list[Part]]]:
        """`[rank][micro_batch][part]` as it was; `Part.record` counts the step's groups in their order.

        Args:
            samples: (record, member) of all that the step has now.

        Raises:
            UnsplittableBatch: another number of ranks, or other samples.
        """
        recorded = self.steps[step]
        if len(recorded.ranks) != dp_size:
            raise UnsplittableBatch(
                f"a replay must have the ranks of the recorded run, {len(recorded.ranks)}; found {dp_size}"
            )
        place = {name: index for index, name in enumerate(recorded.groups)}
        ranks = [
            [[Part(place[group], member, filler) for group, member, filler, _ in parts] for parts in rank]
            for rank in recorded.ranks
        ]
        given = {(p.record, p.member) for rank in ranks for parts in rank for p in parts}
        if given != samples:
            raise UnsplittableBatch(
                f"recorded step {step} must have the samples that it had, {len(given)}; found "
                f"{len(samples)}: rollout.samples_per_group or the custom generate function is another"
            )
        return ranks


def read(path: str | Path) -> Recording:
    """Read a run's `events.jsonl`.

    Raises:
        ConfigError: there is no such file, or no step in it.
    """
    steps: dict[int, events.StepComposed] = {}
    try:
        for event in event_file.read(Path(path)):
            if isinstance(event, events.StepComposed):
                steps = {number: other for number, other in steps.items() if number < event.step}
                steps[event.step] = event
    except OSError as error:
        raise ConfigError(f"run.replay: the log {path} cannot be read: {error.strerror}") from error
    if not steps:
        raise ConfigError(f"run.replay must name the events.jsonl of a run with steps, found none in {path}")
    groups = frozenset(name for step in steps.values() for name in step.groups)
    return Recording(steps=steps, groups=groups)
