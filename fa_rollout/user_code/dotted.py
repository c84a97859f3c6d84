"""Import objects of user code by dotted path: `package.module.function` or `package.module:function`.

The working directory is importable, as with `python -m`. Every failure is a `ConfigError` that names the
option, the path and the accepted form.
"""

import difflib
import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from fa_rollout.config import ConfigError

ACCEPTED = 'a dotted path such as "package.module.function" or "package.module:function"'


def resolve(path: str, *, option: str) -> Any:
    """The object at a dotted path. `option` is the configuration key, for error texts.

    Raises:
        ConfigError: the path is malformed, its module cannot be imported, or it has no such attribute.
    """
    module_path, colon, attribute_path = path.partition(":")
    names = module_path.split(".") + attribute_path.split(".") if colon else path.split(".")
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ConfigError(f"{option} must be {ACCEPTED}, found {path!r}")
    if names[0] == "__main__":
        raise ConfigError(
            f"{option} must be importable from a fresh interpreter, but {path!r} is defined in the script "
            f"itself; move it to a separate module and set {ACCEPTED}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    num_module_names = len(module_path.split(".")) if colon else None
    module, rest = _import(names, num_module_names, path, option)
    found: Any = module
    for name in rest:
        if not hasattr(found, name):
            raise ConfigError(_no_attribute(found, name, path, option))
        found = getattr(found, name)
    return found


def _import(names: list[str], num: int | None, path: str, option: str) -> tuple[ModuleType, list[str]]:
    """The longest prefix that is a module (exactly `num` names if given), and the names after it."""
    for length in [num] if num else range(len(names) - 1, 0, -1):
        name = ".".join(names[:length])
        try:
            return importlib.import_module(name), names[length:]
        except ModuleNotFoundError as error:
            # Only the prefix itself may be missing; a missing import inside the module is the user's error.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise ConfigError(_broken(name, path, option, error)) from error
        # Importing a user's module can fail in any way.
        except (Exception, SystemExit) as error:
            raise ConfigError(_broken(name, path, option, error)) from error
    raise ConfigError(
        f"{option} = {path!r}: no such module; it must be {ACCEPTED}, importable from {os.getcwd()} or from "
        "an installed package"
    )


def _broken(name: str, path: str, option: str, error: BaseException) -> str:
    """The import error and the user's line that raised it, in one line."""
    if isinstance(error, SyntaxError):
        said, where = str(error.msg), f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if _is_users(frame.filename)), frames[-1])
        said, where = str(error), f"{frame.filename}:{frame.lineno}"
    whole = f"run python -c 'import {name}' for the full traceback"
    return f"{option} = {path!r}: importing {name} failed: {type(error).__name__}: {said} ({where}); {whole}"


def _is_users(file: str) -> bool:
    """Whether a file is user code: not the standard library, this package or an installed package."""
    others = (os.path.dirname(os.__file__), os.path.dirname(__file__), "<frozen")
    return not file.startswith(others) and "site-packages" not in file


def _no_attribute(owner: Any, name: str, path: str, option: str) -> str:
    where = getattr(owner, "__name__", type(owner).__name__)
    near = difflib.get_close_matches(name, dir(owner), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it must be {ACCEPTED}"
    return f"{option} = {path!r}: {where} has no attribute {name!r}; {hint}"


def is_url(path: str) -> bool:
    """Whether `reward.function` is the address of a server."""
    return path.startswith(("http://", "https://"))
