"""One session: the calls of one agent in one rollout, on whatever wire they arrive.

| a request | its answer |
|---|---|
| repeats a running one, as a client's retry | that of the running one |
| repeats a finished one, as a retry or because the client never received the answer | the same again |
| any other | is sampled: it extends an earlier answer, or starts a branch |

Invariant: a turn is generated, counted and trained once, however often a client asks for it.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy.typing as npt

from fa_rollout.client.base.errors import ClientError, RequestRefused
from fa_rollout.data.chat import PromptError
from fa_rollout.generator.agents.forms import Answer, GatewayError, Request
from fa_rollout.generator.agents.history import History, Node, Opening
from fa_rollout.generator.agents.messages import ChatMessage, Json
from fa_rollout.generator.agents.parsing import Parsed, Parser
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.turns.sampling import Params, texts_of
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import FinishReason, Sample

_NUM_SEEN = 8
_NUM_REPLAYED = 16
"""Finished calls of a session that a retry can still fetch."""


class Engines(Protocol):
    """What a session samples from: the context of a rollout."""

    async def generate(self, input_ids: npt.ArrayLike, sampling_params: Params) -> Turn: ...

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(slots=True, eq=False)
class Call:
    """A request that is or was answered."""

    digest: bytes
    task: "asyncio.Task[tuple[Answer, Node]]"
    num_waiting: int = 0
    """Connections that wait for it."""

    def answers(self, request: Request) -> bool:
        """Whether its answer is the answer to this request."""
        if self.digest != request.digest or self.task.cancelled():
            return False
        if not self.task.done():
            return request.retry_count > 0 or not self.num_waiting
        if self.task.exception() is not None:
            return False
        return request.retry_count > 0 or not self.task.result()[1].is_delivered


@dataclass(slots=True)
class _Seen:
    """Messages of a request as they arrived and as they were read."""

    read: Callable[[list[Any]], list[ChatMessage]]
    system: str
    raws: list[bytes]
    messages: list[ChatMessage]


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """The calls of one rollout."""

    engines: Engines
    history: History
    parse: Parser
    params: Params
    """Sampling parameters of the run, which a request may narrow."""
    eos_ids: tuple[int, ...]
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    reward: float | None = None
    """As the agent posted it."""
    is_open: bool = True
    _calls: list[Call] = field(default_factory=list)
    _seen: list[_Seen] = field(default_factory=list)
    _nodes: dict[str, Node] = field(default_factory=dict)
    """By the id of the answer."""

    async def complete(self, request: Request) -> tuple[Answer, Node]:
        """The answer to a request. A caller that is cancelled leaves the call running, for a retry.

        Raises:
            GatewayError: there is no answer.
        """
        if not self.is_open:
            raise ended()
        call = next((call for call in reversed(self._calls) if call.answers(request)), None)
        if call is None:
            task = asyncio.get_running_loop().create_task(self._answer(request), name="agent's turn")
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            call = Call(request.digest, task)
            self._calls.append(call)
            self._forget_old()
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if call.task.cancelled() and not self.is_open:
                raise ended() from None
            raise
        finally:
            call.num_waiting -= 1

    def count(self, request: Request) -> int:
        """Number of tokens in a request's prompt.

        Raises:
            GatewayError: it cannot be rendered.
        """
        return len(self._open(request).ids)

    async def close(self) -> list[Sample]:
        """End the session and its running calls. The samples to train on, one for each branch."""
        self.is_open = False
        running = [call.task for call in self._calls if not call.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        return self.history.trained()

    @property
    def messages(self) -> list[list[Json]]:
        """The messages of every branch, for reward functions."""
        return self.history.branches()

    def _forget_old(self) -> None:
        done = [call for call in self._calls if call.task.done()]
        for call in done[:-_NUM_REPLAYED]:
            self._calls.remove(call)

    async def _answer(self, request: Request) -> tuple[Answer, Node]:
        opening = self._open(request)
        params = self.params | request.params
        limit = self.params["max_new_tokens"]
        params["max_new_tokens"] = min(params["max_new_tokens"] or limit, limit)
        try:
            turn = await self.engines.generate(opening.ids, params)
        except RequestRefused as error:
            raise GatewayError(400, f"the engine refuses the request: {error}") from error
        except (ClientError, SampleFailed) as error:
            raise GatewayError(502, f"no engine answered: {error}", code="engine_failed") from error
        if not len(turn.output_ids):
            text = f"the context is full: the prompt has {len(opening.ids)} tokens"
            raise GatewayError(400, text, code="context_length_exceeded", param="messages")
        parsed = self._parsed(turn, request, params)
        message = ChatMessage(
            role="assistant", text=parsed.text, calls=parsed.calls, reasoning=parsed.reasoning
        )
        node = self.history.close(opening, turn, message)
        answer = self._told(turn, parsed, request, len(opening.ids))
        self._nodes[answer.id] = node
        return answer, node

    def _open(self, request: Request) -> Opening:
        try:
            messages = self._read(request)
            if not messages or messages[-1].role == "assistant":
                found = "an answer" if messages else "no message"
                raise ValueError(f"the last message must be the user's or a tool's, found {found}")
            opening = self.history.open(messages, request.tools)
            if opening.parent is not None:  # our own objects, which are cheap to compare the next time
                messages[: len(messages) - len(opening.new)] = opening.parent.messages
            return opening
        except (PromptError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"the messages cannot be used: {error}"
            raise GatewayError(400, text, code="invalid_messages", param="messages") from error

    def _read(self, request: Request) -> list[ChatMessage]:
        """The messages; those that an earlier request started with are not decoded again."""
        if request.continues is not None:
            return self._continued(request, request.continues)
        raws = [bytes(raw) for raw in request.raw_messages]
        known = _Seen(request.read, request.system, [], [])
        for seen in self._seen:
            is_start = len(known.raws) < len(seen.raws) <= len(raws) and raws[: len(seen.raws)] == seen.raws
            if is_start and (seen.read, seen.system) == (request.read, request.system):
                known = seen
        new_raws = raws[len(known.raws) :]
        new = request.read([msgspec.json.decode(raw) for raw in new_raws])
        if request.system and not known.raws:
            new.insert(0, ChatMessage(role="system", text=request.system))
        messages = [*known.messages, *new]
        latest = _Seen(request.read, request.system, [*known.raws, *new_raws], messages)
        self._seen = [*[seen for seen in self._seen if seen is not known][1 - _NUM_SEEN :], latest]
        return messages

    def _continued(self, request: Request, answer_id: str) -> list[ChatMessage]:
        """New instructions replace those of before; without any, those of before stay."""
        node = self._nodes.get(answer_id)
        if node is None:
            text = f"no response {answer_id!r} in this session"
            raise GatewayError(404, text, code="previous_response_not_found", param="previous_response_id")
        messages = node.messages
        if request.system:
            rest = messages[1:] if messages[0].role == "system" else messages
            messages = [ChatMessage(role="system", text=request.system), *rest]
        return [*messages, *request.read([msgspec.json.decode(raw) for raw in request.raw_messages])]

    def _parsed(self, turn: Turn, request: Request, params: Params) -> Parsed:
        ids = turn.output_ids
        if len(ids) and int(ids[-1]) in self.eos_ids:
            ids = ids[:-1]
        text = self.engines.decode(ids, skip_special_tokens=False)
        if turn.finish_reason is FinishReason.STOP and len(ids) == len(turn.output_ids):
            found = [at for stop in texts_of(params, "stop") if (at := text.find(stop)) >= 0]
            text = text[: min(found, default=len(text))]
        parsed = self.parse(text)
        if request.tools is None or not request.may_call:
            return Parsed(text=parsed.text if parsed.reasoning else text, reasoning=parsed.reasoning)
        return parsed

    def _told(self, turn: Turn, parsed: Parsed, request: Request, num_prompt: int) -> Answer:
        answer = Answer(
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=parsed.calls,
            is_cut=turn.finish_reason is FinishReason.LENGTH,
            num_prompt=num_prompt,
            num_sampled=len(turn.output_ids),
            model=request.model,
        )
        if not request.wants_logprobs:
            return answer
        texts = [
            self.engines.decode([ident], skip_special_tokens=False) for ident in turn.output_ids.tolist()
        ]
        return replace(answer, logprobs=list(zip(texts, map(float, turn.logprobs), strict=True)))


def ended() -> GatewayError:
    """No more answers."""
    return GatewayError(410, "this session has ended: its rollout is over", code="session_ended")
