"""The user's reward function: by dotted path, or a callable sent from Python.

A callable travels to worker processes as `multiprocess` sends it, so that closures and functions of the
script itself work too. What cannot be sent is a `ConfigError` that names the accepted form.
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
    """How a function is called."""

    PLAIN = "plain"
    """In a worker process, unless `reward.in_loop`."""
    ASYNC = "async"
    """Awaited in the event loop."""


def pack(function: RewardFunction) -> bytes:
    """A callable as bytes, for `load` in another process of the same program.

    Raises:
        ConfigError: the callable holds something that cannot be sent.
    """
    from multiprocess.reduction import ForkingPickler

    check(function)
    try:
        return bytes(ForkingPickler.dumps(function, recurse=True))
    # Pickling runs code of whatever the callable holds, and each kind of object fails in its own way.
    except Exception as error:
        raise ConfigError(
            f"the reward {function!r} cannot be sent to a worker process ({type(error).__name__}: {error}); "
            f"make what it needs inside the function, or give {ACCEPTED}"
        ) from error


def load(source: str | bytes) -> RewardFunction:
    """The function of a dotted path, or of what `pack` made.

    Raises:
        ConfigError: it cannot be imported or unpacked here, or is no function.
    """
    if isinstance(source, str):
        return check(resolve(source, option=OPTION))
    from multiprocess.reduction import ForkingPickler

    try:
        function = ForkingPickler.loads(source)
    # As in `pack`.
    except Exception as error:
        raise ConfigError(
            f"the reward that was sent cannot be unpacked ({type(error).__name__}: {error}); give {ACCEPTED}"
        ) from error
    return check(function)


def check(function: Any) -> RewardFunction:
    """The function itself, if it can be called with samples.

    Raises:
        ConfigError: it is a class, or no callable.
    """
    if inspect.isclass(function):
        raise ConfigError(f"{OPTION} must name a function or a callable object, found the class {function!r}")
    if not callable(function):
        raise ConfigError(
            f"{OPTION} must name something callable, found {type(function).__name__} {function!r}"
        )
    _check_arguments(function)
    return function  # type: ignore[no-any-return]


_SHAPES = {
    "solution_str": "{name}(sample.metadata.get('data_source'), sample.response, sample.label, "
    "sample.metadata)",
    "completions": "{name}(completions=[sample.response], prompts=[sample.prompt], label=[sample.label])[0]",
}
"""How functions that are written for verl and for TRL are called, by an argument that tells them."""


def _check_arguments(function: Any) -> None:
    """Whether it takes one argument by position; how to call it, where it is written for another library."""
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
        f"{OPTION} must take one argument, a sample (the list of a group's samples with reward.group), found "
        f"{name}{signature}; wrap it: `def reward(sample): return {known.format(name=name)}`"
    )


def kind_of(function: RewardFunction) -> FunctionKind:
    """ASYNC for coroutine functions, bound async methods and objects whose `__call__` is async."""
    while isinstance(function, functools.partial):
        function = function.func
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return FunctionKind.ASYNC if is_async else FunctionKind.PLAIN
