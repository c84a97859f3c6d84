"""One session: the calls of one agent in one rollout, whatever wire they come by.

| a request | its answer |
|---|---|
| that repeats a running one, as a client's retry | is the running one's |
| that repeats an ended one, as a retry | is the same again |
| any other | is sampled: an extension of an earlier answer, or a branch |

Invariant: a turn is generated once, counted once and trained once, however often a client asks for it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

from fa_rollout.client.base.errors import ClientError
from fa_rollout.data.chat import PromptError
from fa_rollout.generator.agents.history import History, Node, Opening
from fa_rollout.generator.agents.messages import ChatMessage, Json, ToolCall
from fa_rollout.generator.agents.parsing import Parsed, Parser
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.turns.sampling import Params
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import FinishReason, Sample

_NUM_SEEN = 8
_NUM_REPLAYED = 64
"""Ended calls of a session whose retries are answered."""


class GatewayError(Exception):
    """A request that gets no answer; each wire says so in its own form."""

    def __init__(self, status: int, message: str, *, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def can_be_retried(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status >= 500


class Engines(Protocol):
    """What a session samples from: the context of a rollout."""

    async def generate(self, input_ids: npt.ArrayLike, sampling_params: Params) -> Turn: ...

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(slots=True, kw_only=True)
class Request:
    """A call in one form."""

    raw_messages: list[msgspec.Raw]
    read: Callable[[list[Any]], list[ChatMessage]]
    """Reads decoded messages of the wire that it came by."""
    system: str = ""
    """Instructions that the wire has apart from the messages."""
    tools: list[Json] | None = None
    """In the form of `chat/completions`, as templates read them."""
    may_call: bool = True
    params: Params = field(default_factory=dict)
    """Sampling parameters that the request sets."""
    model: str = ""
    continues: str | None = None
    """Id of the answer that the messages follow, where the wire names it instead of repeating it."""
    retry_count: int = 0
    digest: bytes = b""
    """Of the whole body."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """A turn in one form."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    is_cut: bool
    """By length."""
    num_prompt: int
    num_sampled: int
    model: str
    logprobs: list[tuple[str, float]]
    """(text, log-probability) of each sampled token."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class _Call:
    task: "asyncio.Task[tuple[Answer, Node]]"
    digest: bytes


class Session:
    """The calls of one rollout."""

    def __init__(
        self,
        engines: Engines,
        history: History,
        parse: Parser,
        *,
        params: Params,
        eos_ids: tuple[int, ...],
    ) -> None:
        """`params`: sampling parameters of the run, which a request may narrow."""
        self.id = secrets.token_hex(8)
        self.secret = secrets.token_urlsafe(24)
        self.history = history
        self.reward: float | None = None
        """As the agent posted it."""
        self._engines = engines
        self._parse = parse
        self._params = params
        self._eos_ids = eos_ids
        self._calls: list[_Call] = []
        self._seen: list[tuple[list[bytes], list[ChatMessage]]] = []
        """Messages of the latest requests, as they came and as they were read."""
        self._nodes: dict[str, Node] = {}
        """By the id of the answer."""
        self._is_open = True

    async def complete(self, request: Request) -> tuple[Answer, Node]:
        """The answer to a request.

        Raises:
            GatewayError: there is none.
        """
        if not self._is_open:
            raise GatewayError(410, "this session has ended: its rollout is over", code="session_ended")
        call = self._repeated(request)
        if call is None:
            task = asyncio.get_running_loop().create_task(self._answer(request), name="agent's turn")
            call = _Call(task, request.digest)
            self._calls.append(call)
            self._forget_old()
        return await asyncio.shield(call.task)

    def count(self, request: Request) -> int:
        """Tokens of a request's prompt.

        Raises:
            GatewayError: it cannot be rendered.
        """
        return len(self._open(request).ids)

    async def close(self) -> list[Sample]:
        """The rollout is over: calls under way end. The samples to train on, one for each branch."""
        self._is_open = False
        running = [call.task for call in self._calls if not call.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        return self.history.trained()

    @property
    def messages(self) -> list[list[Json]]:
        """Of every branch, for reward functions: each branch's last answer with all that came before it."""
        return [
            [message.for_template() for message in node.messages]
            for node in self.history.nodes
            if node.is_tip and node.is_delivered
        ]

    def _repeated(self, request: Request) -> _Call | None:
        if not request.retry_count:
            return None
        return next((call for call in reversed(self._calls) if call.digest == request.digest), None)

    def _forget_old(self) -> None:
        for call in self._calls[:-_NUM_REPLAYED]:
            if call.task.done():
                self._calls.remove(call)

    async def _answer(self, request: Request) -> tuple[Answer, Node]:
        opening = self._open(request)
        if request.continues is None:
            self._remember(request, opening.messages)
        params = self._params | request.params
        limit = self._params["max_new_tokens"]
        params["max_new_tokens"] = min(params.get("max_new_tokens", limit), limit)
        try:
            turn = await self._engines.generate(opening.ids, params)
        except (ClientError, SampleFailed) as error:
            raise GatewayError(502, f"no engine answered: {error}", code="engine_failed") from error
        if not len(turn.output_ids):
            text = f"the context is full: the prompt has {len(opening.ids)} tokens"
            raise GatewayError(400, text, code="context_length_exceeded", param="messages")
        parsed = self._parsed(turn, request)
        answer = ChatMessage(
            role="assistant", text=parsed.text, calls=parsed.calls, reasoning=parsed.reasoning
        )
        node = self.history.close(opening, turn, answer)
        told = self._told(turn, parsed, request, len(opening.ids))
        self._nodes[told.id] = node
        return told, node

    def _open(self, request: Request) -> Opening:
        try:
            return self.history.open(self._read(request), request.tools)
        except (PromptError, ValueError, KeyError, TypeError) as error:
            text = f"the messages cannot be used: {error}"
            raise GatewayError(400, text, code="invalid_messages", param="messages") from error

    def _read(self, request: Request) -> list[ChatMessage]:
        """The messages; those that an earlier request began with are not read again."""
        raws = [bytes(raw) for raw in request.raw_messages]
        if request.continues is not None:
            node = self._nodes.get(request.continues)
            if node is None:
                text = f"no response {request.continues!r} in this session"
                raise GatewayError(
                    404, text, code="previous_response_not_found", param="previous_response_id"
                )
            return [*node.messages, *request.read([msgspec.json.decode(raw) for raw in raws])]
        known, messages = next(
            ((seen, read) for seen, read in reversed(self._seen) if raws[: len(seen)] == seen), ([], [])
        )
        new = request.read([msgspec.json.decode(raw) for raw in raws[len(known) :]])
        if request.system and not known:
            new.insert(0, ChatMessage(role="system", text=request.system))
        return [*messages, *new]

    def _remember(self, request: Request, messages: list[ChatMessage]) -> None:
        """`messages` as the history has them: comparing them with it costs nothing the next time."""
        self._seen.append(([bytes(raw) for raw in request.raw_messages], messages))
        del self._seen[:-_NUM_SEEN]

    def _parsed(self, turn: Turn, request: Request) -> Parsed:
        ids = turn.output_ids
        if len(ids) and int(ids[-1]) in self._eos_ids:
            ids = ids[:-1]
        text = self._engines.decode(ids, skip_special_tokens=False)
        parsed = self._parse(text)
        if request.tools is None or not request.may_call:
            return Parsed(text=text if not parsed.reasoning else parsed.text, reasoning=parsed.reasoning)
        return parsed

    def _told(self, turn: Turn, parsed: Parsed, request: Request, num_prompt: int) -> Answer:
        return Answer(
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=parsed.calls,
            is_cut=turn.finish_reason is FinishReason.LENGTH,
            num_prompt=num_prompt,
            num_sampled=len(turn.output_ids),
            model=request.model,
            logprobs=[
                (self._engines.decode([ident], skip_special_tokens=False), float(logprob))
                for ident, logprob in zip(turn.output_ids.tolist(), turn.logprobs, strict=True)
            ]
            if request.params.get("return_logprobs")
            else [],
        )
