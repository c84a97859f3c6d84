"""Reasoning and tool calls out of an answer's text. Parsing never changes ids: it only reads.

| format | looks like |
|---|---|
| `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes, SmolLM and others |
| `xml` | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder |
| `mistral` | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` |
| `llama` | `{"name": ..., "parameters": {...}}`, the whole answer |

A call that is cut off or broken is text: what the model said is passed on as it is.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fa_rollout.generator.agents.messages import ToolCall

Call = tuple[str, Any]
"""(name, arguments)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What an answer says."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


Parser = Callable[[str], Parsed]
"""Answer's text in, special tokens included but those that end it; the user's own function too."""

_THINK = re.compile(r"^\s*(?:<think>)?(.*?)</think>", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MARKS = (
    ("xml", "<function="),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama", '"parameters"'),
)


def format_of(template: str) -> str:
    """The format that a chat template's own text shows; `hermes` where it shows none."""
    return next((name for name, mark in _MARKS if mark in template), "hermes")


def parser_of(form: str, *, opens_thinking: bool) -> Parser:
    """A parser of one of the formats above.

    Args:
        opens_thinking: the prompt ends with `<think>`, so that an answer begins with its reasoning.
    """
    find = _FORMATS[form]

    def parse(text: str) -> Parsed:
        reasoning, rest = _split_reasoning(text, opens_thinking=opens_thinking)
        remaining, calls = find(rest)
        return Parsed(text=remaining, calls=tuple(tool_call(*call) for call in calls), reasoning=reasoning)

    return parse


def _split_reasoning(text: str, *, opens_thinking: bool) -> tuple[str, str]:
    found = _THINK.match(text)
    if found and (opens_thinking or text.lstrip().startswith("<think>")):
        return found[1].strip("\n"), text[found.end() :].lstrip("\n")
    if text.lstrip().startswith("<think>"):  # cut off in the middle of it
        return text.lstrip().removeprefix("<think>").strip("\n"), ""
    return (text, "") if opens_thinking else ("", text)


def tool_call(name: str, arguments: Any) -> ToolCall:
    """A call with an id that no other has; arguments are an object, or JSON text."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text)


def _hermes(text: str) -> tuple[str, list[Call]]:
    return _bracketed(text, _json_call)


def _xml(text: str) -> tuple[str, list[Call]]:
    return _bracketed(text, _xml_call)


def _bracketed(text: str, read: Callable[[str], Call | None]) -> tuple[str, list[Call]]:
    calls: list[Call] = []

    def take(match: re.Match[str]) -> str:
        call = read(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _TOOL_CALL.sub(take, text)
    return (rest.strip("\n") if calls else text), calls


def _mistral(text: str) -> tuple[str, list[Call]]:
    before, mark, listed = text.partition("[TOOL_CALLS]")
    calls = _decoded(listed) if mark else None
    if not isinstance(calls, list) or not calls:
        return text, []
    found = [_call(entry) for entry in calls]
    return (text, []) if None in found else (before, [call for call in found if call is not None])


def _llama(text: str) -> tuple[str, list[Call]]:
    call = _json_call(text.strip().removeprefix("<|python_tag|>"))
    return (text, []) if call is None else ("", [call])


def _json_call(text: str) -> Call | None:
    return _call(_decoded(text))


def _call(entry: Any) -> Call | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters"))
    return (entry["name"], arguments) if isinstance(arguments, dict) else None


def _xml_call(text: str) -> Call | None:
    function = _FUNCTION.search(text)
    if function is None:
        return _json_call(text)
    values = {name.strip(): _value(raw) for name, raw in _PARAMETER.findall(function[2])}
    return function[1].strip(), values


def _value(raw: str) -> Any:
    """A parameter's text is JSON where it can be read as such, and else text."""
    decoded = _decoded(raw)
    return raw if decoded is None and raw.strip() != "null" else decoded


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


_FORMATS: dict[str, Callable[[str], tuple[str, list[Call]]]] = {
    "hermes": _hermes,
    "xml": _xml,
    "mistral": _mistral,
    "llama": _llama,
}
FORMATS = tuple(_FORMATS)
