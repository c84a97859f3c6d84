"""`POST /v1/chat/completions`: OpenAI's chat wire."""

from collections.abc import Iterator
from typing import Any

import msgspec

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
        "tools",
        "tool_choice",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "logprobs",
        "top_logprobs",
        "response_format",
        "n",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
    ]
)
_IGNORED = frozenset(
    [
        "stream_options",
        "user",
        "metadata",
        "store",
        "parallel_tool_calls",
        "service_tier",
        "prompt_cache_key",
        "safety_identifier",
        "reasoning_effort",
        "verbosity",
        "prediction",
        "modalities",
        "chat_template_kwargs",
        "prompt_cache_retention",
    ]
)
"""Keys that clients always send and that do not change what is sampled here."""
_REFUSED = ("n", "logit_bias", "top_logprobs", "functions", "function_call", "audio", "web_search_options")
"""Keys that would change the answer."""


class Body(msgspec.Struct, kw_only=True):
    """What is read before the rest: messages and tools stay bytes."""

    messages: list[msgspec.Raw]
    model: str = ""
    tools: msgspec.Raw = msgspec.Raw()


def read(body: bytes, rest: Json) -> Request:
    """A request in one form.

    Args:
        rest: keys of the body beside messages and tools.

    Raises:
        GatewayError: a key would change the answer and is not supported.
    """
    head = msgspec.json.decode(body, type=Body)
    for key in _REFUSED:
        if rest.get(key) and (key, rest[key]) != ("n", 1):
            raise unsupported(key, rest[key], _WAYS_OUT.get(key, "leave it out"))
    params = numbers(rest, "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
    params |= token_limit(rest, "max_completion_tokens", "max_tokens")
    if rest.get("stop"):
        params["stop"] = rest["stop"]
    if rest.get("seed") is not None:
        params["sampling_seed"] = rest["seed"]
    params |= grammar(rest.get("response_format"), "response_format")
    return Request(
        raw_messages=head.messages,
        read=messages_of,
        tools=_tools(head.tools),
        may_call=may_call(rest.get("tool_choice")),
        params=params,
        model=head.model,
        wants_logprobs=bool(rest.get("logprobs")),
    )


def unread(rest: Json) -> list[str]:
    """Keys that are neither read nor known to change nothing."""
    return unknown(rest, _KNOWN | _IGNORED)


_WAYS_OUT = {"n": "send one request for each answer: each is a branch"}
_tools = same_tools(list)


def may_call(choice: Any) -> bool:
    """Whether tools may be called. `required` is left to the policy: an answer without a call is its mistake.

    Raises:
        GatewayError: one certain call is demanded, which only the policy may decide.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none", "required", "any"):
        return kind != "none"
    raise unsupported("tool_choice", choice, "use 'auto': a forced call is not the policy's own")


def grammar(form: Any, key: str) -> Json:
    """Sampling parameters for a structured answer."""
    kind = form.get("type") if isinstance(form, dict) else None
    match kind:
        case None | "text":
            return {}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            schema = form.get("json_schema", form).get("schema")
            return {"json_schema": msgspec.json.encode(schema).decode()}
    raise unsupported(key, form, "use text, json_object or json_schema")


def messages_of(entries: list[Any]) -> list[ChatMessage]:
    """Messages of this wire, one for one.

    Raises:
        ValueError: one of them cannot be read.
    """
    return [_message(entry) for entry in entries]


def _message(entry: Any) -> ChatMessage:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise ValueError(f"a message must be an object with a role, found {entry!r:.100}")
    role = "system" if entry["role"] == "developer" else entry["role"]
    return ChatMessage(
        role=role,
        text=text_of(entry.get("content")),
        calls=tuple(
            ToolCall(
                id=str(call.get("id", "")),
                name=str(call.get("function", {}).get("name", "")),
                arguments=str(call.get("function", {}).get("arguments") or "{}"),
            )
            for call in entry.get("tool_calls") or []
        ),
        tool_call_id=entry.get("tool_call_id"),
        name=entry.get("name") if role == "tool" else None,
        reasoning=entry.get("reasoning_content") or entry.get("reasoning") or "",
    )


def write(answer: Answer) -> Json:
    """A whole response."""
    message: Json = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    choice: Json = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
    if answer.logprobs:
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in answer.logprobs
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return _head(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def stream(answer: Answer, *, with_usage: bool) -> Iterator[bytes]:
    """The same as events, content in one piece."""
    head = _head(answer, "chat.completion.chunk")

    def chunk(delta: Json, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event(head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.text:
        yield chunk({"content": answer.text})
    for index, call in enumerate(answer.calls):
        yield chunk({"tool_calls": [{"index": index} | _call(call)]})
    yield chunk({}, _finish(answer))
    if with_usage:
        yield event(head | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error(failure: GatewayError) -> Json:
    """An error's body."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {
        "error": {
            "message": failure.message,
            "type": kind,
            "param": failure.param,
            "code": failure.code or None,
        }
    }


def event(data: Json, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _head(answer: Answer, kind: str) -> Json:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _call(call: ToolCall) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "length" if answer.is_cut else "stop"


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.num_prompt,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }
