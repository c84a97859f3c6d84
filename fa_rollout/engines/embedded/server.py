"""The HTTP routes of generation and of asking how things are. Weights and pauses are in `control`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from fa_rollout.engines.embedded.errors import EngineStopped, RequestRefused
from fa_rollout.engines.embedded.frontend import Frontend, Ticket
from fa_rollout.engines.embedded.protocol import Generate, ModelLimits, parse_generate, wants_stream
from fa_rollout.engines.embedded.reply import Replies, StreamText
from fa_rollout.engines.embedded.scheduler import Limits
from fa_rollout.version import __version__

HEALTH_TIMEOUT_S = 20.0


@dataclass(slots=True, kw_only=True)
class Served:
    """What a server tells of its model; weight updates change the path."""

    model_path: str
    model: ModelLimits
    limits: Limits
    arguments: dict[str, Any]
    started_s: float = field(default_factory=time.monotonic)
    created_at: int = field(default_factory=lambda: int(time.time()))


def json_response(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Our own errors as SGLang words them; others are aiohttp's 500."""
    try:
        response: web.StreamResponse = await handler(request)
    except RequestRefused as error:
        return json_response(error.body, status=error.status)
    except EngineStopped as error:
        return json_response({"error": {"message": str(error)}}, status=503)
    return response


class Server:
    """Handlers over a frontend."""

    def __init__(self, frontend: Frontend, replies: Replies, served: Served) -> None:
        self._frontend = frontend
        self._replies = replies
        self._served = served

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort_request),
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/ping", self.health),
            web.get("/ready", self.ready),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.get("/get_load", self.load),
            web.get("/v1/models", self.models),
        ]

    # -- generation -------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            call = parse_generate(body, self._served.model, self._replies.tokenizer)
            tickets = self._frontend.submit(call.requests)
        except RequestRefused as error:
            if error.status == 400 and wants_stream(body):
                return await self._stream_error(request, str(error))
            raise
        try:
            if call.stream:
                return await self._stream(request, call, tickets)
            return await self._answer(call, tickets)
        finally:
            # A client that hung up cancels this handler: nobody wants what still runs
            self._frontend.abort(tickets)

    async def _answer(self, call: Generate, tickets: list[Ticket]) -> web.Response:
        for ticket in tickets:
            await ticket.progress()
        for ticket in tickets:
            finish = ticket.request.finish
            if finish is not None and finish.status_code is not None:
                raise RequestRefused(finish.message or "aborted", status=finish.status_code)
        answers = [self._reply(call, ticket) for ticket in tickets]
        return json_response(answers if call.is_batch else answers[0])

    async def _stream(
        self, request: web.Request, call: Generate, tickets: list[Ticket]
    ) -> web.StreamResponse:
        response = await self._open_stream(request)
        # A client that is gone ends the stream; `generate` aborts what is left
        with contextlib.suppress(ConnectionResetError):
            async for index, reply in self._chunks(call, tickets):
                if call.is_batch:
                    reply["index"] = index
                await response.write(b"data: " + msgspec.json.encode(reply) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _chunks(
        self, call: Generate, tickets: list[Ticket]
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Replies of all tickets as they progress."""
        queue: asyncio.Queue[tuple[int, dict[str, Any]] | None] = asyncio.Queue()

        async def follow(index: int, ticket: Ticket) -> None:
            text = None
            if self._replies.tokenizer is not None:
                skip = ticket.request.params.skip_special_tokens
                text = StreamText(self._replies.tokenizer, skip_special_tokens=skip)
            while not ticket.is_last:
                await ticket.progress()
                queue.put_nowait((index, self._reply(call, ticket, text)))

        async def follow_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for index, ticket in enumerate(tickets):
                        group.create_task(follow(index, ticket))
            finally:
                queue.put_nowait(None)

        async with asyncio.TaskGroup() as group:
            group.create_task(follow_all())
            while (chunk := await queue.get()) is not None:
                yield chunk

    def _reply(self, call: Generate, ticket: Ticket, text: StreamText | None = None) -> dict[str, Any]:
        return self._replies.build(
            ticket.request,
            ticket.num_output,
            is_last=ticket.is_last,
            weight_version=self._frontend.engine.weight_version,
            text=text,
            with_prompt_ids=call.return_prompt_token_ids,
        )

    async def _open_stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return response

    async def _stream_error(self, request: web.Request, text: str) -> web.StreamResponse:
        error = {"message": text, "type": "invalid_request_error", "code": 400, "retryable": False}
        response = await self._open_stream(request)
        await response.write(b"data: " + msgspec.json.encode({"error": error}) + b"\n\ndata: [DONE]\n\n")
        return response

    async def abort_request(self, request: web.Request) -> web.Response:
        """Always 200 and empty; an unknown rid is ignored."""
        body = await read_object(request)
        if body.get("abort_all"):
            self._frontend.abort_all()
        else:
            self._frontend.abort_rid(str(body.get("rid") or ""))
        return web.Response()

    # -- how things are ---------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        """200 while the engine's thread lives; asks nothing of it, also when paused."""
        return web.Response(status=200 if self._frontend.is_alive else 503)

    async def ready(self, _: web.Request) -> web.Response:
        is_ready = self._frontend.is_alive and self._frontend.engine.pause_mode is None
        return web.Response(status=200 if is_ready else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        """Generate one token; 503 at once while paused, and after 20 s."""
        if not self._frontend.is_alive or self._frontend.engine.pause_mode is not None:
            return web.Response(status=503)
        body = msgspec.json.encode(
            {
                "rid": f"HEALTH_CHECK_{time.monotonic_ns()}",
                "input_ids": [0],
                "sampling_params": {"max_new_tokens": 1},
            }
        )
        tickets = self._frontend.submit(parse_generate(body, self._served.model, None).requests)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await tickets[0].progress()
        except TimeoutError:
            return web.Response(status=503)
        finally:
            self._frontend.abort(tickets)
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        return json_response(
            {
                "model_path": self._served.model_path,
                "tokenizer_path": self._served.arguments["model"],
                "is_generation": True,
                "weight_version": self._frontend.engine.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._served.arguments["model_type"],
                "architectures": self._served.arguments["architectures"],
                "vocab_size": self._served.model.vocab_size,
                "context_length": self._served.model.context_length,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        return json_response(
            {
                **self._served.arguments,
                "engine": "fa_rollout.embedded",
                "version": __version__,
                "model_path": self._served.model_path,
                "served_model_name": self._served.model_path,
                "weight_version": self._frontend.engine.weight_version,
                "context_length": self._served.model.context_length,
                "max_total_num_tokens": self._served.limits.max_total_tokens,
                "max_running_requests": self._served.limits.max_running_requests,
                "uptime_s": time.monotonic() - self._served.started_s,
                "internal_states": [msgspec.to_builtins(self._frontend.engine.statistics())],
            }
        )

    async def loads(self, _: web.Request) -> web.Response:
        statistics, limits = self._frontend.engine.statistics(), self._served.limits
        used = statistics.num_used_tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": statistics.num_running,
            "num_waiting_reqs": statistics.num_waiting,
            "num_waiting_uncached_tokens": statistics.num_waiting_tokens,
            "num_used_tokens": used,
            "num_total_tokens": used + statistics.num_waiting_tokens,
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running_requests,
            "token_usage": round(used / limits.max_total_tokens, 4),
            "gen_throughput": round(statistics.tokens_per_s, 2),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
        }
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": __version__, "loads": [load]})

    async def load(self, _: web.Request) -> web.Response:
        statistics = self._frontend.engine.statistics()
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": statistics.num_running + statistics.num_waiting,
                    "num_waiting_reqs": statistics.num_waiting,
                    "num_tokens": statistics.num_used_tokens + statistics.num_waiting_tokens,
                }
            ]
        )

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._served.model_path,
            "object": "model",
            "created": self._served.created_at,
            "owned_by": "fa_rollout",
            "root": self._served.model_path,
            "parent": None,
            "max_model_len": self._served.model.context_length,
        }
        return json_response({"object": "list", "data": [model]})


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object of a body; no body is an empty one."""
    from fa_rollout.engines.embedded.protocol import bad_body

    body = await request.read()
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body else {}
    except msgspec.DecodeError as error:
        raise bad_body(str(error)) from error
