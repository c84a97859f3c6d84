"""A recorded run as a scenario: its lengths and times, read from its folder.

In: `events.jsonl`. Out: a `Scenario` that should reproduce the run's figures; its knobs can then be changed.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from fa_rollout.account.event_file import FILE_NAME, read
from fa_rollout.config import ConfigError, from_dict
from fa_rollout.records.history import History, histories
from fa_rollout.simulation.scenario import Scenario, recorded_lengths


def scenario_of(folder: Path) -> Scenario:
    """The last launch recorded in a run's folder.

    The decode rate is that of each group's longest answer, from its dispatch to its record, scoring included;
    where answers wait for a slot it is too low. Engines' total rate, prefill and scoring are not told apart.
    Only groups that were finished have lengths: a run that dropped slow ones looks quicker than it would be.

    Raises:
        ConfigError: the log is missing or has too few events.
    """
    path = folder / FILE_NAME if folder.is_dir() else folder
    try:
        launches = histories(read(path))
    except OSError as error:
        raise ConfigError(f"a run's folder must hold {FILE_NAME}, found {path}: {error.strerror}") from None
    launches = [launch for launch in launches if launch.config and launch.steps]
    if not launches:
        raise ConfigError(f"{path} must tell of a run with steps, found none")
    return _scenario(launches[-1], path)


def _scenario(history: History, path: Path) -> Scenario:
    config = from_dict(history.config)
    committed = [group for _, group in sorted(history.groups.items()) if group.response_lens]
    if not committed:
        raise ConfigError(f"{path} must hold groups that were committed, found none")
    rates = [
        max(group.response_lens) / (group.committed_s - group.dispatched_s)
        for group in committed
        if group.committed_s is not None and group.dispatched_s is not None
    ]
    updates = [update for update in history.updates if update.ended_s is not None]
    write_s = [
        u.publishing_s - u.open_s for u in updates if u.publishing_s is not None and u.open_s is not None
    ]
    life = next((life for life in reversed(history.lives) if life.engines), None)
    num_engines = len(life.engines) if life else max(1, len(config.engine.urls))
    num_filtered = sum(group.place == "filtered" for group in history.groups.values())
    return replace(
        Scenario().like(config),
        num_steps=len(history.steps),
        rejection=num_filtered / (num_filtered + len(committed)),
        lengths=recorded_lengths([group.response_lens for group in committed]),
        prompt_tokens=round(_mean(n for group in committed for n in group.prompt_lens)),
        num_engines=num_engines,
        tokens_per_s=median(rates) if rates else Scenario().tokens_per_s,
        train_s=_train_s(history),
        write_s=_mean(write_s),
        update_s=_mean(update.bubble_s for update in updates),
    )


def _train_s(history: History) -> float:
    """From the hand-over of a batch to the end of the slowest rank, without updates."""
    times = [
        max(part.finished_s - part.handed_s for part in step.ranks.values() if part.finished_s is not None)
        for step in history.steps.values()
        if any(part.finished_s is not None for part in step.ranks.values())
    ]
    return _mean(times)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0
