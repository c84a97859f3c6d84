"""The user's reward function: a dotted path, or a callable passed from Python.

Callables are sent to worker processes with `multiprocess`, so that closures and functions of the main script
also work. A callable that cannot be sent is a `ConfigError` that names the accepted form.
"""

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from fa_rollout.config import ConfigError
from fa_rollout.user_code.dotted import ACCEPTED, resolve

OPTION = "reward.function"
RewardFunction = Callable[..., Any]


class FunctionKind(StrEnum):
    """Whether a function is called in a worker or awaited in the loop."""

    PLAIN = "plain"
    """In a worker process, unless `reward.in_loop`."""
    ASYNC = "async"
    """Awaited in the event loop."""


def pack(function: RewardFunction) -> bytes:
    """Pickle a callable for `load` in another process of the same program.

    Raises:
        ConfigError: the callable cannot be pickled.
    """
    from multiprocess.reduction import ForkingPickler

    check(function)
    try:
        return bytes(ForkingPickler.dumps(function, recurse=True))
    # Pickling runs code of the objects that the callable holds, which can raise anything.
    except Exception as error:
        raise ConfigError(
            f"the reward {function!r} cannot be sent to a worker process ({type(error).__name__}: {error}); "
            f"create such objects inside the function, or set {OPTION} to {ACCEPTED}"
        ) from error


def load(source: str | bytes) -> RewardFunction:
    """The function at a dotted path, or from the bytes of `pack`.

    Raises:
        ConfigError: it cannot be imported or unpickled here, or is not callable.
    """
    if isinstance(source, str):
        return check(resolve(source, option=OPTION))
    from multiprocess.reduction import ForkingPickler

    try:
        function = ForkingPickler.loads(source)
    # As in `pack`.
    except Exception as error:
        raise ConfigError(
            f"the reward function cannot be unpickled ({type(error).__name__}: {error}); "
            f"set {OPTION} to {ACCEPTED}"
        ) from error
    return check(function)


def check(function: Any) -> RewardFunction:
    """Return the function if it can be called with samples.

    Raises:
        ConfigError: it is a class, not callable, or takes other arguments.
    """
    if inspect.isclass(function):
        raise ConfigError(f"{OPTION} must name a function or a callable object, found the class {function!r}")
    if not callable(function):
        raise ConfigError(f"{OPTION} must name a callable, found {type(function).__name__} {function!r}")
    _check_arguments(function)
    return function  # type: ignore[no-any-return]


_SHAPES = {
    "solution_str": "{name}(sample.metadata.get('data_source'), sample.response, sample.label, "
    "sample.metadata)",
    "completions": "{name}(completions=[sample.response], prompts=[sample.prompt], label=[sample.label])[0]",
}
"""How to call functions written for verl and for TRL, by an argument name that identifies them."""


def _check_arguments(function: Any) -> None:
    """Check that it takes one positional argument; if it does not, suggest a wrapper."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins may have none
        return
    known = next((call for name, call in _SHAPES.items() if name in signature.parameters), None)
    if known is None:
        try:
            signature.bind(None)
        except TypeError:
            known = "{name}(sample.response, sample.label)"
        else:
            return
    name = getattr(function, "__name__", type(function).__name__)
    raise ConfigError(
        f"{OPTION} must take one argument, a sample (with reward.group: a list of samples), found "
        f"{name}{signature}; wrap it: `def reward(sample): return {known.format(name=name)}`"
    )


def kind_of(function: RewardFunction) -> FunctionKind:
    """ASYNC for coroutine functions, bound async methods and objects with an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return FunctionKind.ASYNC if is_async else FunctionKind.PLAIN
