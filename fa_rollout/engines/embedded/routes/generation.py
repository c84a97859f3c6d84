"""The HTTP routes `/generate` and `/abort_request`."""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web

from fa_rollout.engines.embedded.engine.frontend import Frontend, PendingReply
from fa_rollout.engines.embedded.errors import RefusedRequest
from fa_rollout.engines.embedded.routes.http import json_response, read_body
from fa_rollout.engines.embedded.routes.protocol import Generate, ModelLimits, parse_generate, wants_stream
from fa_rollout.engines.embedded.routes.reply import Replies, StreamText

logger = logging.getLogger(__name__)


class AbortBody(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class Generation:
    """Handlers over a frontend."""

    def __init__(self, frontend: Frontend, replies: Replies, limits: ModelLimits) -> None:
        self._frontend = frontend
        self._replies = replies
        self._limits = limits

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort_request),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            call = parse_generate(body, self._limits, self._replies.tokenizer)
            tickets = self._frontend.submit(call.requests)
        except RefusedRequest as error:
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

    async def _answer(self, call: Generate, tickets: list[PendingReply]) -> web.Response:
        for ticket in tickets:
            await ticket.progress()
        for ticket in tickets:
            finish = ticket.request.finish
            if finish is not None and finish.status_code is not None:
                raise RefusedRequest(finish.message or "aborted", status=finish.status_code)
        answers = [self._reply(call, ticket) for ticket in tickets]
        return json_response(answers if call.is_batch else answers[0])

    async def _stream(
        self, request: web.Request, call: Generate, tickets: list[PendingReply]
    ) -> web.StreamResponse:
        response = await self._open_stream(request)
        try:
            async with asyncio.TaskGroup() as group:
                for index, ticket in enumerate(tickets):
                    group.create_task(self._follow(response, call, ticket, index if call.is_batch else None))
            await response.write(b"data: [DONE]\n\n")
        except* ConnectionResetError:
            logger.info("client left a stream rid=%s", tickets[0].request.rid)
        return response

    async def _follow(
        self, response: web.StreamResponse, call: Generate, ticket: PendingReply, index: int | None
    ) -> None:
        """Write a chunk whenever a request has more to show."""
        text = None
        if self._replies.tokenizer is not None:
            skip = ticket.request.params.skip_special_tokens
            text = StreamText(self._replies.tokenizer, skip_special_tokens=skip)
        while not ticket.is_last:
            await ticket.progress()
            reply = self._reply(call, ticket, text)
            if index is not None:
                reply["index"] = index
            await response.write(b"data: " + msgspec.json.encode(reply) + b"\n\n")

    def _reply(self, call: Generate, ticket: PendingReply, text: StreamText | None = None) -> dict[str, Any]:
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
        body = await read_body(request, AbortBody)
        if body.abort_all:
            self._frontend.abort_all()
        else:
            self._frontend.abort_rid(body.rid or "")
        return web.Response()
