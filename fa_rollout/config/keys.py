"""The configuration's keys as people see them: their words, and a flag for each, `--rollout.staleness 2`.

In: `config.sections`, the only definition, and the words of a command line. Out: one `Key` each, in order,
for the reference page, help and completion; and the tables that flags lay over a configuration file, where
the same rules check them.

| a key that holds | is given as |
|---|---|
| text, a number, a size, a time | the plain value: `--reward.function task:reward`, `--ring.bytes 8GiB` |
| true or false | `--ring.poison` or `--ring.poison true`, `--data.shuffle false` |
| a list | one flag per entry, or TOML: `--sampling.stop '["a", "b"]'` |
| a table | one flag per entry, or TOML: `--evaluation.sampling.temperature 0` |
"""

import ast
import difflib
import inspect
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from fa_rollout.config import rules
from fa_rollout.config import sections as definition
from fa_rollout.config.errors import ConfigError
from fa_rollout.config.quantities import is_quantity
from fa_rollout.config.quantities import written as written_plainly

Changes = dict[str, dict[str, Any]]
"""Section -> key -> value, as a file would give them."""

_FLAG = re.compile(r"--([a-z][\w-]*)\.([\w-]+)(?:\.([\w-]+))?(?:=(.*))?", re.DOTALL)
_BOOLS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section."""

    section: str
    name: str
    default: str | None
    """As a file writes it, or `not set`; None: the key is required."""
    doc: str
    hint: Any
    """The type."""

    @property
    def path(self) -> str:
        """`section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def words(self) -> str:
        """What a value may be, in words."""
        return rules.words(self.hint)

    @property
    def flag(self) -> str:
        """What the command line calls it."""
        return f"--{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table of the configuration."""

    name: str
    doc: str
    keys: tuple[Key, ...]


@cache
def sections() -> tuple[Section, ...]:
    """All of them."""
    tree = ast.parse(inspect.getsource(definition))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return tuple(
        Section(
            name=field.name,
            doc=inspect.getdoc(field.type) or "",
            keys=tuple(_keys(field.name, field.type, classes[field.type.__name__])),
        )
        for field in msgspec.structs.fields(definition.Config)
    )


@cache
def by_path() -> dict[str, Key]:
    """All keys by `section.name`."""
    return {key.path: key for section in sections() for key in section.keys}


def nearest(path: str) -> str | None:
    """The key that was probably meant; its own name counts more than its section."""
    same_name = [key for key in by_path() if key.rpartition(".")[2] == path.rpartition(".")[2]]
    near = difflib.get_close_matches(path, same_name or by_path(), n=1, cutoff=0.0 if same_name else 0.75)
    if near:
        return near[0]
    by_name = {key.name: key.path for key in by_path().values()}
    near = difflib.get_close_matches(path.rpartition(".")[2], by_name, n=1, cutoff=0.75)
    return by_name[near[0]] if near else None


def _keys(section: str, kind: type, source: ast.ClassDef) -> list[Key]:
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field for field in msgspec.structs.fields(kind)}
    return [
        Key(
            section=section,
            name=node.target.id,
            default=_default(defaults[node.target.id], hints[node.target.id]),
            doc=_doc(following),
            hint=hints[node.target.id],
        )
        for node, following in zip(source.body, [*source.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _default(field: msgspec.structs.FieldInfo, hint: Any) -> str | None:
    if field.required:
        return None
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return "not set" if value is None else written_plainly(hint, value)


def _doc(node: ast.stmt | None) -> str:
    """The docstring under a key, on one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def take_flags(words: Sequence[str]) -> tuple[list[str], Changes]:
    """The words that are not flags of keys, in order; and the changes that the flags make.

    Raises:
        ConfigError: a flag names no key, or has no value.
    """
    rest: list[str] = []
    changes: Changes = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = _FLAG.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        key = _key_of(f"{match[1]}.{match[2]}")
        text = match[4] if match[4] is not None else _next(key, queue)
        _put(changes.setdefault(key.section, {}), key, match[3], text)
    return rest, changes


def _key_of(path: str) -> Key:
    key = by_path().get(path)
    if key is not None:
        return key
    near = nearest(path)
    hint = f"did you mean --{near}?" if near else "run --help-keys lists them"
    raise ConfigError(f"unknown configuration key --{path}; {hint}")


def _next(key: Key, queue: list[str]) -> str:
    """The word after a flag; a flag for true or false may stand alone."""
    if _kind(key.hint) is bool and (not queue or queue[0].lower() not in _BOOLS):
        return "true"
    if not queue:
        raise ConfigError(f"{key.flag} must be followed by its value ({key.words})")
    return queue.pop(0)


def _put(values: dict[str, Any], key: Key, entry: str | None, text: str) -> None:
    kind = _kind(key.hint)
    origin = get_origin(kind)
    if origin is dict:
        table = values.setdefault(key.name, {})
        whole = _literal(text)
        if entry:
            table[entry] = plain_value(get_args(kind)[1], text)
        elif isinstance(whole, dict):
            table.update(whole)
        else:
            raise ConfigError(f"{key.flag} must be a TOML table or {key.flag}.NAME, found {text!r}")
    elif entry:
        raise ConfigError(f"{key.flag} holds no table, found {key.flag}.{entry}")
    elif origin is list:
        whole = _literal(text) if text.lstrip().startswith("[") else None
        items = whole if isinstance(whole, list) else [plain_value(get_args(kind)[0], text)]
        values[key.name] = [*values.get(key.name, []), *items]
    else:
        values[key.name] = plain_value(key.hint, text)


def plain_value(hint: Any, text: str) -> Any:
    """Text as a number or truth value if the key holds one; the checks refuse what cannot be converted."""
    kind = _kind(hint)
    if kind is bool:
        return _BOOLS.get(text.lower(), text)
    if kind in (int, float):
        return text if is_quantity(hint) else _number(text)
    return text if kind is str or get_origin(kind) is Literal else _literal(text)


def _number(text: str) -> Any:
    value = _literal(text)
    if isinstance(value, int | float):
        return value
    try:
        return float(text)
    except ValueError:
        return text


def _literal(text: str) -> Any:
    """A TOML value, or the text itself if it is not one."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _kind(hint: Any) -> Any:
    """The type without None and without limits."""
    return rules.bare(rules.alternatives(hint)[0])
