"""The configuration's keys, for people: what each is called, takes and means.

In: `config.sections`, the only definition. Out: one `Key` each, in its order. The reference page, the flags
of the command line and their help are made from these.
"""

import ast
import difflib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec

from fa_rollout.config import rules
from fa_rollout.config import sections as definition
from fa_rollout.config.quantities import written as written_plainly


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
    """The key that somebody may have meant; its own name counts more than its section."""
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
