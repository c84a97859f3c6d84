"""`POST /v1/responses`: OpenAI's Responses wire, stateless or with `previous_response_id`."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fa_rollout.generator.agents.chat import event, grammar, may_call
from fa_rollout.generator.agents.forms import (
    Answer,
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
        "input",
        "model",
        "stream",
        "instructions",
        "tools",
        "tool_choice",
        "temperature",
        "top_p",
        "max_output_tokens",
        "text",
        "previous_response_id",
    ]
)
_IGNORED = frozenset(
    [
        "include",
        "store",
        "metadata",
        "user",
        "parallel_tool_calls",
        "service_tier",
        "truncation",
        "reasoning",
        "prompt_cache_key",
        "safety_identifier",
        "client_metadata",
        "background",
        "max_tool_calls",
        "prompt_cache_retention",
        "top_logprobs",
    ]
)


class Body(msgspec.Struct, kw_only=True):
    """What is read before the rest."""

    input: str | list[msgspec.Raw] = []
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    previous_response_id: str | None = None


def read(body: bytes, rest: Json) -> Request:
    """A request in one form; its input alone, where it names an earlier response.

    Raises:
        GatewayError: a key would change the answer and is not supported.
    """
    head = msgspec.json.decode(body, type=Body)
    items = head.input
    if isinstance(items, str):
        items = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": items}))]
    params = numbers(rest, "temperature", "top_p") | token_limit(rest, "max_output_tokens")
    params |= grammar((rest.get("text") or {}).get("format"), "text.format")
    return Request(
        raw_messages=items,
        read=messages_of,
        system=head.instructions or "",
        tools=_tools(head.tools),
        may_call=may_call(rest.get("tool_choice")),
        params=params,
        model=head.model,
        continues=(head.previous_response_id or "").removeprefix("resp_") or None,
    )


def unread(rest: Json) -> list[str]:
    """Keys that are neither read nor known to change nothing."""
    return unknown(rest, _KNOWN | _IGNORED)


@same_tools
def _tools(tools: list[Json]) -> list[Json]:
    """Functions as templates read them. Tools that a provider would run itself do not exist here."""
    return [
        {
            "type": "function",
            "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
        }
        for tool in tools
        if tool.get("type") == "function"
    ]


def messages_of(items: list[Any]) -> list[ChatMessage]:
    """Items of this wire: a run of reasoning, message and function_call items is one answer.

    Raises:
        ValueError: an item cannot be read.
    """
    found: list[ChatMessage] = []
    reasoning, text, is_answer = "", "", False
    calls: list[ToolCall] = []

    def flush() -> None:
        nonlocal reasoning, text, calls, is_answer
        if is_answer:
            found.append(ChatMessage(role="assistant", text=text, calls=tuple(calls), reasoning=reasoning))
        reasoning, text, calls, is_answer = "", "", [], False

    for item in items:
        if not isinstance(item, dict):
            raise ValueError(f"an item of input must be an object, found {item!r:.100}")
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "reasoning":
            flush() if text or calls else None
            reasoning, is_answer = _reasoning(item), True
        elif kind == "function_call":
            calls.append(ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"]))
            is_answer = True
        elif kind == "message" and role == "assistant":
            text, is_answer = text + text_of(item.get("content")), True
        elif kind == "message":
            flush()
            role = "system" if role == "developer" else str(role)
            found.append(ChatMessage(role=role, text=text_of(item.get("content"))))
        elif kind == "function_call_output":
            flush()
            output = text_of(item.get("output"))
            found.append(ChatMessage(role="tool", text=output, tool_call_id=item["call_id"]))
        else:
            raise unsupported("input", kind, "use messages, reasoning, function calls and their outputs")
    flush()
    return found


def _reasoning(item: Json) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part.get("text", "") for part in parts)


def write(answer: Answer) -> Json:
    """A whole response."""
    cut = {"reason": "max_output_tokens"} if answer.is_cut and not answer.calls else None
    return _head(answer) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": cut,
        "output": _output(answer),
        "usage": {
            "input_tokens": answer.num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt + answer.num_sampled,
        },
    }


def stream(answer: Answer) -> Iterator[bytes]:
    """The same as events. One that was cut is `completed` here: clients fail on any other end."""
    number = 0

    def sent(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    begun = _head(answer) | {"status": "in_progress", "output": [], "usage": None}
    yield sent("response.created", response=begun)
    yield sent("response.in_progress", response=begun)
    for index, item in enumerate(_output(answer)):
        place = {"output_index": index, "item_id": item["id"]}
        empty = item | ({"content": []} if item["type"] == "message" else {})
        yield sent("response.output_item.added", output_index=index, item=empty)
        if item["type"] == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            yield sent("response.content_part.added", content_index=0, part=part, **place)
            yield sent("response.output_text.delta", content_index=0, delta=answer.text, logprobs=[], **place)
            yield sent("response.output_text.done", content_index=0, text=answer.text, logprobs=[], **place)
            yield sent("response.content_part.done", content_index=0, part=item["content"][0], **place)
        elif item["type"] == "function_call":
            yield sent("response.function_call_arguments.delta", delta=item["arguments"], **place)
            yield sent(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
                **place,
            )
        yield sent("response.output_item.done", output_index=index, item=item)
    yield sent("response.completed", response=write(answer) | {"status": "completed"})


def _head(answer: Answer) -> Json:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _output(answer: Answer) -> list[Json]:
    items: list[Json] = []
    if answer.reasoning:
        text = {"type": "summary_text", "text": answer.reasoning}
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [text]})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    items += [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in answer.calls
    ]
    return items
