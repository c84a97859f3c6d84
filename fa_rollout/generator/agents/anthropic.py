"""`POST /v1/messages`: Anthropic's wire."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fa_rollout.generator.agents.chat import event, grammar, may_call
from fa_rollout.generator.agents.forms import (
    Answer,
    GatewayError,
    Request,
    numbers,
    same_tools,
    token_limit,
    unknown,
    unsupported,
)
from fa_rollout.generator.agents.messages import ChatMessage, Json, ToolCall, text_of

_KNOWN = frozenset(
    [
        "messages",
        "model",
        "stream",
        "system",
        "tools",
        "tool_choice",
        "stop_sequences",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "output_config",
    ]
)
_IGNORED = frozenset(["metadata", "thinking", "service_tier", "context_management", "betas", "container"])
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_KINDS |= {404: "not_found_error", 410: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Body(msgspec.Struct, kw_only=True):
    """What is read before the rest."""

    messages: list[msgspec.Raw]
    model: str = ""
    system: Any = None
    tools: msgspec.Raw = msgspec.Raw()


def read(body: bytes, rest: Json) -> Request:
    """A request in one form.

    Raises:
        GatewayError: a key would change the answer and is not supported.
    """
    head = msgspec.json.decode(body, type=Body)
    params = numbers(rest, "temperature", "top_p", "top_k") | token_limit(rest, "max_tokens")
    if rest.get("stop_sequences"):
        params["stop"] = rest["stop_sequences"]
    form = (rest.get("output_config") or {}).get("format")
    params |= grammar(form, "output_config.format")
    return Request(
        raw_messages=head.messages,
        read=messages_of,
        system=text_of(head.system),
        tools=_tools(head.tools),
        may_call=may_call(rest.get("tool_choice")),
        params=params,
        model=head.model,
    )


def unread(rest: Json) -> list[str]:
    """Keys that are neither read nor known to change nothing."""
    return unknown(rest, _KNOWN | _IGNORED)


@same_tools
def _tools(tools: list[Json]) -> list[Json]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in tools
        if tool.get("type") in (None, "custom")
    ]


def messages_of(entries: list[Any]) -> list[ChatMessage]:
    """Messages of this wire; results of tools become messages before the rest of their user message.

    Raises:
        ValueError: one of them cannot be read.
    """
    found: list[ChatMessage] = []
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("role") not in ("user", "assistant", "system"):
            raise ValueError(f"a message must have the role user, assistant or system, found {entry!r:.100}")
        content = entry.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if entry["role"] == "assistant":
            found.append(_answer(blocks))
            continue
        found += [
            ChatMessage(role="tool", text=text_of(block.get("content")), tool_call_id=block["tool_use_id"])
            for block in blocks
            if block.get("type") == "tool_result"
        ]
        texts = [block for block in blocks if block.get("type") != "tool_result"]
        if texts or not blocks:
            found.append(ChatMessage(role=entry["role"], text=text_of(texts)))
    return found


def _answer(blocks: list[Json]) -> ChatMessage:
    text, reasoning, calls = "", "", []
    for block in blocks:
        match block.get("type"):
            case "text":
                text += block["text"]
            case "thinking":
                reasoning += block["thinking"]
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = msgspec.json.encode(block["input"]).decode()
                calls.append(ToolCall(id=block["id"], name=block["name"], arguments=arguments))
            case kind:
                raise unsupported("messages", kind, "use text, thinking and tool_use blocks")
    return ChatMessage(role="assistant", text=text, calls=tuple(calls), reasoning=reasoning)


def write(answer: Answer) -> Json:
    """A whole response."""
    return _head(answer) | {
        "content": _content(answer),
        "stop_reason": _stop(answer),
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def stream(answer: Answer) -> Iterator[bytes]:
    """The same as events; `event:` lines are required by this wire's clients."""
    begun = _head(answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = _usage(answer) | {"output_tokens": 0}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(_content(answer)):
        place = {"index": index}
        for kind, data in _block_events(block):
            yield event({"type": kind, **place, **data}, kind)
    delta = {"stop_reason": _stop(answer), "stop_sequence": None}
    usage = {"output_tokens": answer.num_sampled}
    yield event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _block_events(block: Json) -> Iterator[tuple[str, Json]]:
    match block["type"]:
        case "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            empty = block | {"thinking": ""}
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            empty = block | {"input": {}}
            text = msgspec.json.encode(block["input"]).decode()
            delta = {"type": "input_json_delta", "partial_json": text}
    yield "content_block_start", {"content_block": empty}
    yield "content_block_delta", {"delta": delta}
    yield "content_block_stop", {}


def error(failure: GatewayError) -> Json:
    """An error's body."""
    kind = _KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


def _head(answer: Answer) -> Json:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _content(answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.id})
    if answer.text or not answer.calls:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": msgspec.json.decode(c.arguments)}
        for c in answer.calls
    ]
    return blocks


def _stop(answer: Answer) -> str:
    return "tool_use" if answer.calls else "max_tokens" if answer.is_cut else "end_turn"


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.num_prompt,
        "output_tokens": answer.num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
