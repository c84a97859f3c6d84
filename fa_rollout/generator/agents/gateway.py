"""The gateway: an HTTP server in the generator that agents take for their model's provider.

| path below a session's address | wire |
|---|---|
| `/v1/chat/completions` | OpenAI chat |
| `/v1/responses` | OpenAI Responses |
| `/v1/messages`, `/v1/messages/count_tokens` | Anthropic |
| `/v1/models` | both |
| `/reward` | the agent's own verdict, `{"reward": 1.0}` |

Each session has an address and a secret of its own. Who has them may sample from the run's engines and set
the reward of that one rollout, until it ends, and nothing else.

Invariant: a failure has its status before the first byte, unless a stream had to be kept alive.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import web

from fa_rollout.generator.agents import anthropic, chat, responses
from fa_rollout.generator.agents.forms import Answer, GatewayError, Request
from fa_rollout.generator.agents.messages import Json
from fa_rollout.generator.agents.session import Session, ended
from fa_rollout.user_code.failure import in_one_line, told

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 15.0
"""Silence after which a stream gets a comment: clients give up after 600 s, proxies much sooner."""

Handler = Callable[[web.Request, Session], Any]


class Gateway:
    """Sessions by their address."""

    def __init__(self, host: str, port: int, model: str) -> None:
        """`port` 0: any that is free."""
        self._host, self._port, self._model = host, port, model
        self._sessions: dict[str, Session] = {}
        self._told: set[str] = set()
        """Keys that were reported as passed over."""
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be had.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        wires: list[tuple[str, ModuleType]] = [
            ("/v1/chat/completions", chat),
            ("/v1/responses", responses),
            ("/v1/messages", anthropic),
        ]
        for path, wire in wires:
            app.router.add_post(f"/{{session}}{path}", self._guarded(wire, self._completing(wire)))
        app.router.add_post(
            "/{session}/v1/messages/count_tokens", self._guarded(anthropic, self._count_tokens)
        )
        app.router.add_get("/{session}/v1/models", self._guarded(chat, self._models))
        app.router.add_get("/{session}/v1/models/{model}", self._guarded(chat, self._one_model))
        app.router.add_post("/{session}/reward", self._guarded(chat, self._reward))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def aclose(self) -> None:
        """Stop to listen; calls under way end."""
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, session: Session) -> None:
        """Serve a session."""
        self._sessions[session.id] = session

    def address_of(self, session: Session) -> str:
        """Where a session is served; OpenAI clients add `/v1`."""
        return f"{self.address}/{session.id}"

    def remove(self, session: Session) -> None:
        """Its calls are refused from now on; idempotent."""
        self._sessions.pop(session.id, None)

    # --- requests -------------------------------------------------------------------------------------

    def _guarded(self, wire: ModuleType, handler: Handler) -> Callable[[web.Request], Any]:
        """The session's secret first; failures in the wire's own form."""
        failed = getattr(wire, "error", chat.error)

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session_of(request)
                response: web.StreamResponse = await handler(request, session)
                return response
            except ConnectionError:
                return web.Response(status=499)  # the client is gone; nobody reads this
            except web.HTTPException:
                raise
            except Exception as error:
                failure = error if isinstance(error, GatewayError) else _mistake(error)
                headers = {"x-should-retry": "true" if failure.can_be_retried else "false"}
                return _json(failed(failure), status=failure.status, headers=headers)

        return handle

    def _session_of(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key") or bearer
        if session is None:
            raise ended()
        if not hmac.compare_digest(key.encode(), session.secret.encode()):
            raise GatewayError(401, "the session's key is wrong or missing", code="invalid_api_key")
        if "Origin" in request.headers:
            raise GatewayError(403, "pages of a browser are not served", code="forbidden")
        return session

    def _completing(self, wire: ModuleType) -> Handler:
        async def complete(request: web.Request, session: Session) -> web.StreamResponse:
            body = await _body(request)
            rest = _rest(body)
            asked = _asked(wire, body, rest)
            self._report(wire.unread(rest), wire.__name__.rpartition(".")[2])
            asked.model = asked.model or self._model
            asked.digest = hashlib.blake2b(body, digest_size=16).digest()
            asked.retry_count = _count(request.headers.get("x-stainless-retry-count"))
            if rest.get("stream"):
                return await self._stream(request, session, asked, wire, rest)
            answer, node = await session.complete(asked)
            response = _json(wire.write(answer))
            await response.prepare(request)
            await response.write_eof()
            node.is_delivered |= _is_connected(request)
            return response

        return complete

    async def _stream(
        self, request: web.Request, session: Session, asked: Request, wire: ModuleType, rest: Json
    ) -> web.StreamResponse:
        """Comments while the answer is sampled, then its events; the status waits for the first of both."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        call = asyncio.ensure_future(session.complete(asked))
        try:
            await asyncio.wait({call}, timeout=KEEP_ALIVE_S)
            if call.done():
                call.result()  # raises before the first byte
            await response.prepare(request)
            while not call.done():
                await response.write(b": wait\n\n")
                await asyncio.wait({call}, timeout=KEEP_ALIVE_S)
            try:
                answer, node = call.result()
            except GatewayError as error:
                failed = getattr(wire, "error", chat.error)
                await response.write(chat.event(failed(error), "error"))
                return response
            await response.write(b"".join(_events(wire, answer, rest)))
            await response.write_eof()
            node.is_delivered |= _is_connected(request)
            return response
        finally:
            call.cancel()  # the sampling goes on, for a retry

    async def _count_tokens(self, request: web.Request, session: Session) -> web.Response:
        body = await _body(request)
        return _json({"input_tokens": session.count(_asked(anthropic, body, _rest(body)))})

    async def _models(self, _: web.Request, __: Session) -> web.Response:
        return _json({"object": "list", "data": [{"id": self._model, "object": "model"}], "has_more": False})

    async def _one_model(self, request: web.Request, _: Session) -> web.Response:
        return _json({"id": request.match_info["model"], "object": "model"})

    async def _reward(self, request: web.Request, session: Session) -> web.Response:
        value = _rest(await _body(request)).get("reward")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GatewayError(400, f"reward must be a number, found {value!r:.100}", param="reward")
        session.reward = float(value)
        return _json({"reward": session.reward})

    def _report(self, keys: list[str], wire: str) -> None:
        """Unknown keys, each once."""
        new = [key for key in keys if key not in self._told]
        if new:
            self._told.update(new)
            logger.warning("event=keys_passed_over wire=%s keys=%s", wire, ",".join(new))


def _events(wire: ModuleType, answer: Answer, rest: Json) -> Iterator[bytes]:
    if wire is chat:
        return chat.stream(answer, with_usage=bool((rest.get("stream_options") or {}).get("include_usage")))
    events: Iterator[bytes] = wire.stream(answer)
    return events


def _asked(wire: ModuleType, body: bytes, rest: Json) -> Request:
    try:
        asked: Request = wire.read(body, rest)
        return asked
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GatewayError(400, f"the request cannot be read: {error}") from error


def _mistake(error: Exception) -> GatewayError:
    """The user's parser raised, or this code is wrong: the same request would fail again."""
    logger.error("event=gateway_failed\n%s", told(error))
    return GatewayError(422, f"the gateway failed: {in_one_line(error)}", code="gateway_failed")


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"a body may have {MAX_BODY_BYTES} bytes"
        raise GatewayError(413, text, code="request_too_large") from error


def _rest(body: bytes) -> Json:
    """The keys of a body, without messages and tools, which may be large."""
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        large = ("messages", "input", "tools", "system", "instructions")
        return {key: msgspec.json.decode(raw) for key, raw in values.items() if key not in large}
    except msgspec.DecodeError as error:
        raise GatewayError(400, f"the body must be a JSON object: {error}") from error


def _count(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _json(value: Json, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json"
    )
