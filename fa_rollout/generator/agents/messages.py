"""Chat messages in one form, whatever wire they came by, and when two of them are the same.

Frameworks send our answers back changed: reasoning dropped, arguments serialised again, empty content as
null, text beside tool calls left out. None of that edits history; other text, calls or roles do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in an answer."""

    id: str
    name: str
    arguments: str
    """JSON text."""

    def is_same(self, other: "ToolCall") -> bool:
        """Whether the other is this one, its arguments perhaps serialised again."""
        if (self.id, self.name) != (other.id, other.name):
            return False
        return self.arguments == other.arguments or _parsed(self.arguments) == _parsed(other.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message without what no template shows: ids of items, status, annotations, cache marks."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    name: str | None = None
    reasoning: str = ""

    def is_same(self, resent: "ChatMessage") -> bool:
        """Whether a client that was told this message sends it back as `resent`.

        With tool calls the text may be missing, since their ids, unique in a session, name the answer.
        """
        if (self.role, self.tool_call_id, len(self.calls)) != (
            resent.role,
            resent.tool_call_id,
            len(resent.calls),
        ):
            return False
        if not all(own.is_same(other) for own, other in zip(self.calls, resent.calls, strict=True)):
            return False
        if self.text != resent.text and (resent.text or not self.calls):
            return False
        ours, theirs = self.reasoning.strip(), resent.reasoning.strip()
        return not ours or not theirs or ours == theirs

    def for_template(self) -> Json:
        """As chat templates read it: arguments of calls are objects."""
        shown: Json = {"role": self.role, "content": self.text}
        if self.calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parsed(call.arguments)},
                }
                for call in self.calls
            ]
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            shown["name"] = self.name
        return shown


def text_of(content: Any) -> str:
    """Text of a message's content: text, or parts of it; null and missing are empty.

    Raises:
        ValueError: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"content must be text or a list of parts, found {type(content).__name__}")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"content parts must be text, found one of type {kind!r}: the model is given text alone")


def _parsed(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments


def same_length(stored: Sequence[ChatMessage], sent: Sequence[ChatMessage]) -> int:
    """Number of messages from the start that are the same."""
    for index, (own, other) in enumerate(zip(stored, sent, strict=False)):
        if own is not other and not own.is_same(other):
            return index
    return min(len(stored), len(sent))
