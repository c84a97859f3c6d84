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

from fa_rollout.config import sections as definition

_WORDS = {
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "Positive": "a whole number from 1 on",
    "NotNegative": "a whole number from 0 on",
    "Share": "0.0 to 1.0",
    "Bytes": "a size such as 64MiB",
    "Seconds": "a time such as 30s",
    "list[str]": "text, any number of times",
    "list[int]": "a whole number, any number of times",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section."""

    section: str
    name: str
    kind: str
    """The type, as the definition writes it."""
    default: str | None
    """As the definition writes it; None: the key is required."""
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
        text = self.kind.removesuffix(" | None")
        if text.startswith("Literal["):
            return " | ".join(text[len("Literal[") : -1].replace("'", "").split(", "))
        return _WORDS.get(text, text)

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
    return [
        Key(
            section=section,
            name=node.target.id,
            kind=ast.unparse(node.annotation),
            default=None if node.value is None else ast.unparse(node.value),
            doc=_doc(following),
            hint=hints[node.target.id],
        )
        for node, following in zip(source.body, [*source.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _doc(node: ast.stmt | None) -> str:
    """The docstring under a key, on one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
