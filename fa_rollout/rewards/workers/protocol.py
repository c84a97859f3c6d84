"""Messages of a runner and its workers: `WorkerSetup`; `WorkerReady` or `WorkerRefused`; samples, `Done`.

Not in the worker's own module: that one is called `__main__` in the worker, and pickle goes by name.
"""

from dataclasses import dataclass

from fa_rollout.rewards.call import Shape
from fa_rollout.rewards.function import FunctionKind
from fa_rollout.rewards.outcomes import Outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """First message to a worker."""

    function: str | bytes
    """Dotted path, or a packed callable."""
    shape: Shape
    sys_path: list[str]
    """The runner's, so that the worker can import what the runner can."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The function is loaded."""

    kind: FunctionKind


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """The function cannot be loaded."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The outcomes of one item."""

    outcomes: Outcomes
    elapsed_s: float
