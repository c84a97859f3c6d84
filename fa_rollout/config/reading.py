"""A configuration from TOML or nested tables, checked whole before anything starts."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec

from fa_rollout.config.sections import Config, Data, Engine, Launch, Sampling
from fa_rollout.misspelt import explained
from fa_rollout.quantities import QuantityError, with_plain_quantities
from shm.errors import FaRolloutError
from trainer_hook.record import COLUMNS, ExtraColumn


class ConfigError(FaRolloutError, ValueError):
    """A configuration that cannot be run; the text names the key, the value and the way out."""


def from_dict(tree: dict[str, Any]) -> Config:
    """A checked configuration from nested tables.

    Raises:
        ConfigError: a key is unknown or missing, or a value breaks a rule.
    """
    try:
        config = msgspec.convert(_with_plain_quantities(tree), Config)
    except msgspec.ValidationError as error:
        sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
        raise ConfigError(explained(str(error), sections | {"": Config})) from None
    _check_engines(config.engine, config.launch)
    if config.data.shard >= config.data.num_shards:
        found = f"{config.data.shard} of {config.data.num_shards}"
        raise ConfigError(f"data.shard must be below data.num_shards, found {found}")
    _check_template(config.data)
    if config.metrics.interval_s < 0.1:
        raise ConfigError(f"metrics.interval_s must be 0.1 s or more, found {config.metrics.interval_s:g}")
    if config.engine.shared and (not config.engine.urls or config.data.num_shards == 1):
        raise ConfigError(
            "engine.shared needs engine.urls, the same on every node, and data.shard of data.num_shards "
            f"(--shard I/N); found {len(config.engine.urls)} urls and {config.data.num_shards} shards"
        )
    _check_columns(config.record.columns)
    sampling_with(config.sampling, config.evaluation.sampling)
    return config


RESERVED_TEMPLATE_NAMES = ("messages", "tools", "add_generation_prompt")
"""Variables of a chat template that are filled in for each prompt."""


def reserved_template_name(values: Iterable[str]) -> str | None:
    """The first of these names that would hide what a chat template is given for each prompt."""
    return next((name for name in values if name in RESERVED_TEMPLATE_NAMES), None)


def _check_template(data: Data) -> None:
    if reserved := reserved_template_name(data.chat_template_kwargs):
        raise ConfigError(
            f"data.chat_template_kwargs must not contain {reserved!r}, which is filled in for each prompt"
        )
    used = data.chat_template_kwargs or data.chat_template_kwargs_key
    if data.chat_template is False and used:
        raise ConfigError(
            "data.chat_template_kwargs and data.chat_template_kwargs_key need the chat template, found "
            "data.chat_template = false; leave one of them out"
        )


def _check_engines(engine: Engine, launch: Launch) -> None:
    if not engine.urls and engine.model is None and launch.command is None:
        raise ConfigError("engine.urls or engine.model must be given: there is nothing to sample from")
    if launch.server == "embedded" and launch.command is not None:
        raise ConfigError('launch.command goes with launch.server = "sglang", found "embedded"')
    needed = launch.number * launch.gpus_per_engine
    if launch.gpus is not None and len(launch.gpus) < needed:
        found = f"{len(launch.gpus)} for {launch.number} x {launch.gpus_per_engine}"
        raise ConfigError(f"launch.gpus must have launch.gpus_per_engine devices an engine, found {found}")


def sampling_with(sampling: Sampling, changes: dict[str, Any]) -> Sampling:
    """The same sampling with some keys changed.

    Raises:
        ConfigError: a key is unknown, or a value breaks a rule.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(sampling) | changes, Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sampling keys of an evaluation must be those of [sampling]: {error}") from None


def _check_columns(columns: list[ExtraColumn]) -> None:
    taken = {column.name for column in COLUMNS}
    for column in columns:
        if column.name in taken or column.name.startswith("cu_"):
            raise ConfigError(
                f"record.columns must name each column once, and none like those of every record, found "
                f"{column.name!r}"
            )
        taken.add(column.name)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested tables of plain numbers and text; `from_dict` takes them back."""
    return cast(dict[str, Any], msgspec.to_builtins(config))


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


def _with_plain_quantities(tree: dict[str, Any]) -> dict[str, Any]:
    """The same tables with sizes and times that were written as text turned into numbers.

    Raises:
        ConfigError: one cannot be read.
    """
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    try:
        return {
            name: with_plain_quantities(sections[name], value, name)
            if name in sections and isinstance(value, dict)
            else value
            for name, value in tree.items()
        }
    except QuantityError as error:
        raise ConfigError(str(error)) from None
