"""What a slime user can set of fa_rollout: attributes `fa_rollout_<name>` of slime's arguments, or variables
`FA_ROLLOUT_<NAME>` of the environment.

Attributes come from the YAML file of slime's `--custom-config-path`; they win over the environment.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

import msgspec

from fa_rollout.config import ConfigError, checked
from fa_rollout.config.keys import plain_value

_PREFIX = "fa_rollout_"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """All options, each with a default that suits a first run."""

    staleness: int = 4
    """Weight versions between the one that trains a batch and the oldest among its tokens, at most. Under
    `train_async` a batch is composed one update before it is trained, so 1 is the least."""
    staleness_policy: Literal["wait", "drop", "retry", "mask", "keep"] = "wait"
    """What happens to groups that would exceed the limit; `wait` holds the batch until they are in it."""
    arrays: bool = False
    """Numpy arrays in `Sample.tokens` (int64) and `.rollout_log_probs` (float32) in place of lists."""
    on_error: Literal["raise", "retry"] = "raise"
    """What an exception in generate, reward, hook or filter does: end the run with its traceback, or retry
    the group, up to `max_attempts` times."""
    max_attempts: int = 3
    """Attempts of a group, with `on_error = retry` or `staleness_policy = retry`."""
    max_rejections: int | None = None
    """Groups in a row that the dynamic filter may drop before the run stops; None: one epoch, but 64 at
    least and 1,000 at most."""
    fast_client: bool = True
    """Sample plain prompts by fa_rollout's client; False: by slime's own `generate`."""
    ring_bytes: int | str | None = None
    """Shared memory between generator and manager, such as `"256MiB"`; None: by batch and lengths."""
    idle_timeout_s: float | str | None = None
    """Longest time that the functions of a group may run without a request to an engine (slime's `post` or
    `generate`); then the group fails. None: half of `stall_s`."""
    stall_s: float | str = 3600.0
    """Longest wait for a batch; the error says who waits for whom."""
    request_timeout_s: float | str = 7200.0
    """Longest time for an engine's answer; pauses do not count."""
    generator_restarts: int = 5
    """Restarts of the generator allowed within ten minutes."""
    log_dir: str | None = None
    """Folder for the event log; None: no log."""


def read_options(args: Any, environment: Mapping[str, str] = os.environ) -> Options:
    """The options that slime's arguments and the environment set.

    Raises:
        ConfigError: one is unknown, or its value is not allowed.
    """
    known = Options.__struct_fields__
    given = {
        name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)
    }
    for name in given.keys() - set(known):
        near = difflib.get_close_matches(name, known, n=1) or known
        raise ConfigError(f"unknown option {_PREFIX}{name}; did you mean {_PREFIX}{near[0]}?")
    found = {name: environment[_PREFIX.upper() + name.upper()] for name in known if _in(environment, name)}
    hints = get_type_hints(Options)
    values = {name: plain_value(hints[name], text) for name, text in found.items()} | given
    return Options(
        **{name: checked(hints[name], value, f"{_PREFIX}{name}") for name, value in values.items()}
    )


def _in(environment: Mapping[str, str], name: str) -> bool:
    return bool(environment.get(_PREFIX.upper() + name.upper()))
