"""One or several knobs over ranges of values: every combination is played, and compared in a table.

In: a scenario and `NAME=VALUES`. Out: rows of figures.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from fa_rollout.config import ConfigError
from fa_rollout.simulation.model import simulate
from fa_rollout.simulation.scenario import Scenario

_ALIASES = {
    "engines": "num_engines",
    "concurrency": "num_slots",
    "policy": "staleness_policy",
    "surplus": "surplus_groups",
    "interval": "update_interval",
    "steps": "num_steps",
}
"""Shorter names of knobs; the longer ones are those of `Scenario`."""
NAMES = tuple(_ALIASES) + tuple(
    field.name for field in fields(Scenario) if field.name not in ("lengths", *_ALIASES.values())
)
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One knob and its values."""

    name: str
    """As it was given."""
    values: tuple[Any, ...]

    @property
    def field(self) -> str:
        """Of `Scenario`."""
        return _ALIASES.get(self.name, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One setting."""

    setting: dict[str, Any]
    figures: dict[str, float]


def parse(texts: Sequence[str]) -> list[Sweep]:
    """`staleness=0..8` or `engines=1,2,4` each.

    Raises:
        ConfigError: a name is unknown, a value is of the wrong kind, or there are too many combinations.
    """
    sweeps = [_parse(text) for text in texts]
    num_rows = 1
    for sweep in sweeps:
        num_rows *= len(sweep.values)
    if num_rows > _MAX_ROWS:
        raise ConfigError(f"a sweep may have {_MAX_ROWS} settings, found {num_rows}; give fewer values")
    return sweeps


def play(scenario: Scenario, sweeps: Sequence[Sweep], *, num_seeds: int = 1) -> Iterator[SweepRow]:
    """Every combination, the first knob slowest; figures are means over `num_seeds` runs.

    Raises:
        ConfigError: a setting breaks a rule of the configuration, or cannot go on.
    """
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        changes = {sweep.field: value for sweep, value in zip(sweeps, values, strict=True)}
        setting = {sweep.name: value for sweep, value in zip(sweeps, values, strict=True)}
        one = replace(scenario, **changes)
        try:
            found = [simulate(replace(one, seed=one.seed + number)).figures() for number in range(num_seeds)]
        except RuntimeError as error:
            raise ConfigError(f"{setting or 'this run'} stands still for good: {error}") from None
        yield SweepRow(setting=setting, figures={key: fmean(one[key] for one in found) for key in found[0]})


def _parse(text: str) -> Sweep:
    name, separator, rest = text.partition("=")
    name = name.replace("-", "_").removeprefix("rollout.")
    if not separator or (name not in NAMES and name not in _ALIASES.values()):
        raise ConfigError(
            f"a sweep must be NAME=A..B or NAME=A,B,C with one of {', '.join(NAMES)}, found {text!r}"
        )
    sample = getattr(Scenario(), _ALIASES.get(name, name))
    match = _RANGE.fullmatch(rest)
    parts = [str(n) for n in range(int(match[1]), int(match[2]) + 1)] if match else rest.split(",")
    try:
        values = tuple(type(sample)(part) for part in parts)
    except ValueError:
        raise ConfigError(f"{name} must have values such as {sample!r}, found {rest!r}") from None
    if not values:
        raise ConfigError(f"{name} must have values, found {rest!r}")
    return Sweep(name=name, values=values)
