"""The failure guide quotes what the sources say, and names every error that they raise."""

import ast
import re
from functools import cache

import pytest
from doc_kit import ROOT

GUIDE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
PACKAGES = ("shm", "trainer_hook", "fa_rollout")
INSIDE = {
    "FaRolloutError": "the root of all",
    "ShmError": "the root of those of shared memory",
    "HookError": "the root of those of the hook",
    "ClientError": "the root of those of the client",
    "EngineError": "the root of those of the embedded engine",
    "RequestAborted": "an abort is no failure: it never leaves the generator",
}
"""Errors that no reader sees by these names."""


@cache
def trees() -> list[ast.Module]:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sources]


def text_of(node: ast.expr) -> str:
    """A literal's text, with a gap for each expression in it."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) if isinstance(part, ast.Constant) else "\0" for part in parts)
        case _:
            return ""


@pytest.fixture(scope="module")
def literals() -> str:
    """All text of the sources but docstrings; what stands between two literals is a gap."""
    docstrings = set()
    found = []
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                docstrings.add(id(node.value))
            elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings:
                found.append(text_of(node))
    return "\0".join(found)


def quoted() -> list[str]:
    """The messages of the guide: what stands in code in a row's first cell, and reads like words."""
    rows = re.findall(r"^\| (.+?) \|", GUIDE, flags=re.M)
    lines = [*rows, *re.findall(r"^`[^\n]+", GUIDE, flags=re.M)]
    cells = [cell for line in lines for cell in re.findall(r"`([^`]+)`", line)]
    return [cell for cell in cells if " " in cell]


@pytest.mark.parametrize("message", quoted())
def test_message_is_what_the_sources_say(message: str, literals: str) -> None:
    for fragment in re.split(r" ?… ?", message):
        assert fragment in literals, f"no source says {fragment!r} any more"


def test_every_error_has_its_place() -> None:
    families = {"FaRolloutError"}
    classes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(4):  # as deep as the tree of errors is
        families |= {
            node.name
            for node in classes
            if {base.id for base in node.bases if isinstance(base, ast.Name)} & families
        }
    missing = (
        {name for name in families if not name.startswith("_")} - set(INSIDE) - set(re.findall(r"\w+", GUIDE))
    )
    assert not missing, f"the guide says nothing of {sorted(missing)}"
    assert set(INSIDE) - {"RequestAborted"} <= families
