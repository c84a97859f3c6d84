"""A configuration from TOML or nested tables, checked whole before anything starts; and back to TOML."""

import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec
import tomli_w

from fa_rollout.config.checks import check, check_sampling
from fa_rollout.config.errors import ConfigError
from fa_rollout.config.paths import PathError, with_whole_paths
from fa_rollout.config.quantities import QuantityError, with_plain_quantities
from fa_rollout.config.rules import fault
from fa_rollout.config.sections import Config, Sampling
from fa_rollout.process.masking import masked


def from_dict(tree: dict[str, Any]) -> Config:
    """A checked configuration from nested tables.

    Raises:
        ConfigError: a key is unknown or missing, or a value breaks a rule.
    """
    config: Config = checked(Config, _with_plain_values(tree), "")
    check(config)
    sampling_with(config.sampling, config.evaluation.sampling)
    return config


def checked(kind: Any, tree: Any, key: str) -> Any:
    """A value of this type from plain tables; `key`: what the user calls it.

    Raises:
        ConfigError: a key is unknown or missing, or a value breaks a rule.
    """
    found = fault(kind, tree, key)
    if found is not None:
        raise ConfigError(found)
    return msgspec.convert(tree, kind)


def sampling_with(sampling: Sampling, changes: dict[str, Any]) -> Sampling:
    """The same sampling with some keys changed.

    Raises:
        ConfigError: a key is unknown, or a value breaks a rule.
    """
    changed: Sampling = checked(Sampling, msgspec.to_builtins(sampling) | changes, "evaluation.sampling")
    check_sampling(changed, "evaluation.sampling")
    return changed


def to_dict(config: Config) -> dict[str, Any]:
    """Nested tables of plain numbers and text; `from_dict` takes them back."""
    return cast(dict[str, Any], msgspec.to_builtins(config))


def to_shown_dict(config: Config) -> dict[str, Any]:
    """The same without secrets, to be written down or shown."""
    return masked(to_dict(config))


def to_toml(tree: dict[str, dict[str, Any]]) -> str:
    """Tables as TOML text. TOML has no null: a key that is None becomes a comment below its section."""
    return "\n".join(
        tomli_w.dumps({section: _without_none(table)})
        + "".join(f"# {key} is not set\n" for key, value in table.items() if value is None)
        for section, table in tree.items()
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list | tuple) else value


def load(path: str | Path | None, changes: dict[str, dict[str, Any]] | None = None) -> Config:
    """Read a TOML file; `changes` (section -> key -> value) are laid over it, or stand alone without one.

    Raises:
        ConfigError: the file is not there, is no TOML, or breaks a rule.
    """
    tree: dict[str, Any] = {} if path is None else _read(path)
    for section, values in (changes or {}).items():
        below = tree.setdefault(section, {})
        for key, value in values.items() if isinstance(below, dict) else ():
            is_table = isinstance(value, dict) and isinstance(below.get(key), dict)
            below[key] = below[key] | value if is_table else value
    return from_dict(tree)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} must be TOML: {error}") from error


def _with_plain_values(tree: dict[str, Any]) -> dict[str, Any]:
    """The same tables with sizes and times as numbers, and with whole paths.

    Raises:
        ConfigError: one cannot be read.
    """
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    plain = dict(tree)
    try:
        for name in sections.keys() & tree.keys():
            if isinstance(tree[name], dict):
                table = with_plain_quantities(sections[name], tree[name], name)
                plain[name] = with_whole_paths(sections[name], table, name)
    except (QuantityError, PathError) as error:
        raise ConfigError(str(error)) from None
    return plain
