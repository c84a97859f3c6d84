"""`POST /v1/chat/completions`: OpenAI's chat wire."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fa_rollout.generator.agents.messages import ChatMessage, Json, ToolCall, text_of
from fa_rollout.generator.agents.session import Answer, GatewayError, Request

IGNORED = frozenset(
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
"""Keys that clients send as a matter of course, and that do not change what is sampled here."""
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


class Body(msgspec.Struct, kw_only=True):
    """What is read before the rest: messages stay bytes."""

    messages: list[msgspec.Raw]
    model: str = ""
    stream: bool | None = None
    tools: list[Json] | None = None


def read(body: bytes, rest: Json) -> Request:
    """A request in one form.

    Args:
        rest: keys of the body beside messages and tools.

    Raises:
        GatewayError: a key would change the answer and is not supported.
    """
    head = msgspec.json.decode(body, type=Body)
    params: Json = {}
    for key in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        if rest.get(key) is not None:
            params[key] = rest[key]
    limit = rest.get("max_completion_tokens") or rest.get("max_tokens")
    if limit is not None:
        params["max_new_tokens"] = limit
    if rest.get("stop") is not None:
        params["stop"] = rest["stop"]
    if rest.get("seed") is not None:
        params["sampling_seed"] = rest["seed"]
    if rest.get("logprobs"):
        params["return_logprobs"] = True
    if rest.get("n") not in (None, 1):
        raise unsupported("n", rest["n"], "send one request for each answer: each is a branch")
    if rest.get("top_logprobs"):
        raise unsupported("top_logprobs", rest["top_logprobs"], "leave it out")
    params |= grammar(rest.get("response_format"), "response_format")
    return Request(
        raw_messages=head.messages,
        read=messages_of,
        tools=head.tools or None,
        may_call=may_call(rest.get("tool_choice")),
        params=params,
        model=head.model,
    )


def unknown(rest: Json) -> list[str]:
    """Keys that would be passed over in silence otherwise."""
    return sorted(key for key, value in rest.items() if value is not None and key not in _KNOWN | IGNORED)


def unsupported(key: str, value: Any, way_out: str) -> GatewayError:
    """A key that would change the answer."""
    text = f"{key} = {value!r:.100} is not supported by this gateway: {way_out}"
    return GatewayError(400, text, code="unsupported_parameter", param=key)


def may_call(choice: Any) -> bool:
    """Whether tools may be called.

    Raises:
        GatewayError: a call is demanded, which the policy alone decides.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
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
