"""One engine's HTTP endpoints, as SGLang 0.5.x has them. No decision is taken here.

In: bytes and plain values. Out: bytes and plain values, or `HttpFailure` with the failure's class.
"""

import asyncio
import io
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from fa_rollout.client.base.errors import (
    AnswerTooLong,
    ControlFailed,
    ControlRefused,
    ControlUnanswered,
    FailureClass,
    KeyRefused,
)
from fa_rollout.client.base.policy import FailurePolicy, classify_status
from fa_rollout.client.engine.network import key_hint, read_body, read_start, retry_after_s
from fa_rollout.client.engine.standing import Standing
from fa_rollout.client.engine.tensor_body import TensorBody
from fa_rollout.client.wire.verdict import ServerVerdict

ROUTING_HEADER = "X-SMG-Routing-Key"
_TAKEN = "Duplicate request ID"
"""What SGLang calls an id that a running request has."""
_JSON = {"Content-Type": "application/json"}
_LARGE_BODY_BYTES = 1 << 19  # beyond this aiohttp sends in pieces, so that the loop is not held up


_MAX_CONTROL_BYTES = 1 << 26
_MAX_ERROR_BYTES = 500
"""Of an error's body, as much as is shown."""


class HttpFailure(Exception):
    """A request without a whole answer: the class of the failure, and what was seen."""

    def __init__(
        self,
        failure: FailureClass,
        text: str,
        *,
        status: int | None = None,
        may_run: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(text)
        self.failure = failure
        self.status = status
        """None where none came."""
        self.may_run = may_run
        """The engine may have the request still: it was sent, and neither answered nor refused."""
        self.retry_after_s = retry_after_s
        """The server's own word on when to come again."""


class Engine:
    """The endpoints of one SGLang server, or of a router."""

    def __init__(self, url: str, session: aiohttp.ClientSession, policy: FailurePolicy) -> None:
        self.url = url
        self._session = session
        self.policy = policy
        self.standing = Standing()
        self._generate_url = URL(f"{url}/generate")
        self.missed_abort = False
        """It did not answer the last abort."""

    async def generate(self, body: bytes, routing_key: str | None, max_bytes: int) -> bytes:
        """Send one request; the whole answer.

        Raises:
            HttpFailure: no whole answer.
        """
        headers = _JSON if routing_key is None else {**_JSON, ROUTING_HEADER: routing_key}
        data = body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
        try:
            async with self._session.post(
                self._generate_url, data=data, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                _check_plain(response)
                return await read_body(response, max_bytes)
        except AnswerTooLong as error:
            raise HttpFailure(FailureClass.INVALID, str(error), may_run=True) from None
        except (aiohttp.ClientError, OSError) as error:  # OSError includes aiohttp's connect timeout
            self.standing.label = None  # it may have been started anew, with any weights
            never_sent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise HttpFailure(FailureClass.TRANSIENT, describe(error), may_run=not never_sent) from error

    async def call(
        self, method: str, path: str, payload: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """A control call; the JSON object it answers, empty when the body is empty or no object.

        Raises:
            ControlFailed: refused, unreachable, or silent until the deadline.
        """
        limit_s = timeout_s or self.policy.control_timeout_s
        data = None if payload is None else msgspec.json.encode(payload)
        return _object(await self._control(method, path, data, limit_s))

    async def call_any(self, path: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        """A POST whose answer may be any JSON; None where it is none."""
        return await self._control("POST", path, msgspec.json.encode(payload), timeout_s)

    async def call_with(self, path: str, body: TensorBody, *, timeout_s: float) -> dict[str, Any]:
        """The same with a body that is made as it is sent."""
        return _object(await self._control("POST", path, body, timeout_s))

    async def _control(self, method: str, path: str, data: bytes | TensorBody | None, limit_s: float) -> Any:
        status, body = await self._exchange(method, path, data, limit_s)
        if hint := key_hint(status):
            raise KeyRefused(f"{method} {self.url}{path} must be accepted, found {status}{hint}")
        if status >= 300:
            text = body[:500].decode(errors="replace")
            raise ControlRefused(f"{method} {self.url}{path} must be accepted, found {status} {text}", status)
        try:
            return msgspec.json.decode(body) if body else None
        except (msgspec.DecodeError, RecursionError):
            return None

    async def status(self, path: str, timeout_s: float) -> int | None:
        """The HTTP status of a GET, None when none came."""
        try:
            return (await self._exchange("GET", path, None, timeout_s))[0]
        except ControlFailed:
            return None

    async def _exchange(
        self, method: str, path: str, body: bytes | TensorBody | None, limit_s: float
    ) -> tuple[int, bytes]:
        data: Any = body
        headers = _JSON
        if isinstance(body, TensorBody):
            data, headers = body.chunks(), {**_JSON, "Content-Length": str(body.num_bytes)}
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    method, f"{self.url}{path}", data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                if response.status >= 300:
                    return response.status, (await read_start(response, _MAX_ERROR_BYTES)).encode()
                _check_plain(response)
                return response.status, await read_body(response, _MAX_CONTROL_BYTES)
        except (HttpFailure, AnswerTooLong) as error:
            raise ControlFailed(f"{method} {self.url}{path} must be answered: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                text = f"no answer within {limit_s:g} s"
                raise ControlUnanswered(f"{method} {self.url}{path} must be answered: {text}") from error
            self.standing.label = None
            text = describe(error)
            raise ControlFailed(f"{method} {self.url}{path} must be answered: {text}") from error


def _object(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}


async def _refusal(response: aiohttp.ClientResponse) -> HttpFailure:
    """What an answer of another status than 200 says."""
    status = response.status
    text = await read_start(response, _MAX_ERROR_BYTES)
    # No id is used twice here: a router tried again, and the first try may run still.
    is_taken = status == 400 and _TAKEN in text
    target, more = response.headers.get("Location"), key_hint(status)
    if target and status < 400:
        more = f" (a redirect to {target!r:.200}; none is followed)"
    return HttpFailure(
        FailureClass.TRANSIENT if is_taken else classify_status(status),
        f"{status} {text}{more}",
        status=status,
        may_run=is_taken,
        retry_after_s=retry_after_s(response),
    )


def failure_of(verdict: ServerVerdict) -> HttpFailure:
    """The failure that an error under status 200 stands for."""
    assert verdict.status is not None, "an error without a status is no answer at all"
    return HttpFailure(
        classify_status(verdict.status), f"{verdict}{key_hint(verdict.status)}", status=verdict.status
    )


def _check_plain(response: aiohttp.ClientResponse) -> None:
    """Raise HttpFailure for a body that is packed, which nobody asked for."""
    packed = response.headers.get("Content-Encoding", "identity")
    if packed != "identity":
        text = f"an answer must come as it is, since no compression is asked for; found {packed!r:.40}"
        raise HttpFailure(FailureClass.INVALID, text, may_run=True)


def describe(error: BaseException) -> str:
    """Type and text of an error; many network errors have no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
