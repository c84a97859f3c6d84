"""What processes write for one another is typed: events of the log, and messages."""

import ast
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from fa_rollout.account import event_file, events
from trainer_hook import messages as m
from trainer_hook.messages.streaming import Stage

ROOT = Path(__file__).parents[2]
OPAQUE = {
    (m.EvaluationPrompt, "prompt"): "messages as the user's chat template takes them",
    (m.EvaluationPrompt, "label"): "the user's own",
    (m.EvaluationPrompt, "metadata"): "the user's own",
    (m.EvaluationOrder, "sampling"): "SGLang's parameters, which the generator checks",
    (events.HubBegan, "config"): "the configuration's tree, as the user wrote it",
}


def structs(found: object, seen: set[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """All structs that are part of a type."""
    if isinstance(found, type) and issubclass(found, msgspec.Struct) and found not in seen:
        seen.add(found)
        for hint in get_type_hints(found).values():
            structs(hint, seen)
    for part in get_args(found):
        structs(part, seen)
    return seen


def has_any(hint: object) -> bool:
    return hint is Any or hint is object or any(map(has_any, get_args(hint)))


def test_no_field_of_a_message_or_an_event_is_of_any_type_but_the_users_own() -> None:
    kinds: set[type[msgspec.Struct]] = set()
    for kind in (*m.Message.__subclasses__(), *event_file.kinds(), *get_args(Stage)):
        structs(kind, kinds)
    hints = {(kind, name): hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    assert {place for place, hint in hints.items() if has_any(hint)} == OPAQUE.keys()


@pytest.fixture(scope="module")
def written() -> dict[str, list[set[str]]]:
    """By event: the fields of each call that makes one in the hub."""
    calls: dict[str, list[set[str]]] = {}
    for path in (ROOT / "fa_rollout" / "hub").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "events"
            ):
                calls.setdefault(node.attr, [])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                calls.setdefault(node.func.attr, []).append({word.arg or "" for word in node.keywords})
    return calls


def test_every_event_is_written_and_every_field_of_it(written: dict[str, list[set[str]]]) -> None:
    settled = {kind.__name__ for kind in events.SETTLED.values()}
    missing = {kind.__name__ for kind in event_file.kinds()} - written.keys() - settled
    assert not missing, f"events that nobody writes: {missing}"
    for kind in event_file.kinds():
        optional = {field.name for field in msgspec.structs.fields(kind) if not field.required} - {"t"}
        given = set().union(*written.get(kind.__name__, []))
        assert optional <= given, f"{kind.__name__}: fields that nobody writes: {optional - given}"
