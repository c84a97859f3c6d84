"""A small HTTP/1.1 server on bare asyncio: no task per request, so that thousands may hang at once.

In: bytes of clients. Out: `Exchange` objects for the handler, which answers each once, now or later.
One exchange at a time per connection; bodies by Content-Length; answers whole, or chunked as event streams.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 1 << 18
_MORE_S = 1e-3
"""Between two looks at whether an answer without end may go on."""


class Exchange:
    """One request and the way to answer it."""

    __slots__ = ("_connection", "body", "headers", "is_open", "method", "on_lost", "path", "query")

    def __init__(
        self, connection: "Connection", method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        self._connection = connection
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        """Names in lower case."""
        self.body = body
        self.is_open = True
        self.on_lost: Callable[[], None] | None = None
        """Called when the client goes away before the answer."""

    def send(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        *,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        """The whole answer; `headers` beside the usual ones."""
        if self._close():
            head = f"HTTP/1.1 {status} {_reason(status)}\r\n"
            if body:
                head += f"Content-Type: {kind}\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
            self._connection.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            self._connection.answered()

    def send_json(self, value: Any, status: int = 200) -> None:
        """A JSON answer."""
        self.send(status, msgspec.json.encode(value))

    def send_part_and_drop(self, body: bytes) -> None:
        """Half of an answer, then the connection ends."""
        if self._close():
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self._connection.write(head.encode() + body[: len(body) // 2])
            self._connection.drop(abruptly=False)

    def send_endless(self) -> None:
        """Spaces, until the client goes away."""
        self._connection.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._more()

    def _more(self) -> None:
        if self.is_open:
            if self._connection.num_unsent < _MAX_UNSENT_BYTES:
                self._connection.write(b"%x\r\n%b\r\n" % (_MAX_UNSENT_BYTES, b" " * _MAX_UNSENT_BYTES))
            asyncio.get_running_loop().call_later(_MORE_S, self._more)

    def drop(self) -> None:
        """No answer; the connection is reset."""
        if self._close():
            self._connection.drop(abruptly=True)

    def unanswered(self) -> "Exchange":
        """The same request, whose answer goes nowhere."""
        twin = Exchange(self._connection, self.method, f"{self.path}?{self.query}", self.headers, self.body)
        twin.is_open = False
        return twin

    def begin_stream(self) -> None:
        """Head of an event stream."""
        if self.is_open:
            self._connection.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )

    def event(self, data: bytes) -> None:
        """One event of a stream."""
        if self.is_open:
            payload = b"data: " + data + b"\n\n"
            self._connection.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def end_stream(self) -> None:
        """End mark and end of a stream."""
        self.event(b"[DONE]")
        if self._close():
            self._connection.write(b"0\r\n\r\n")
            self._connection.answered()

    def lost(self) -> None:
        """The client went away."""
        if self._close() and self.on_lost is not None:
            self.on_lost()

    def _close(self) -> bool:
        was_open, self.is_open = self.is_open, False
        return was_open


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, handle: Callable[[Exchange], None], idle_timeout_s: Callable[[], float]) -> None:
        self._handle = handle
        self._idle_timeout_s = idle_timeout_s
        self._idle: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._stay_awake()
        if self._exchange is not None:
            self._exchange.lost()

    def data_received(self, data: bytes) -> None:
        self._stay_awake()
        self._buffer += data
        self._next()

    def write(self, data: bytes) -> None:
        """Bytes to the client, if it is still there."""
        if self._transport is not None:
            self._transport.write(data)

    @property
    def num_unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def drop(self, *, abruptly: bool) -> None:
        """End the connection; abruptly: what was not sent yet is thrown away."""
        self._exchange = None
        if self._transport is not None:
            if abruptly:
                self._transport.abort()
            else:
                self._transport.close()

    def answered(self) -> None:
        """The exchange is over; the client may have sent the next request already."""
        self._exchange = None
        if self._buffer:
            self._next()
        elif self._idle_timeout_s() > 0:
            delay_s = self._idle_timeout_s()
            self._idle = asyncio.get_running_loop().call_later(delay_s, self._drop_idle)

    def _drop_idle(self) -> None:
        if self._exchange is None:
            self.drop(abruptly=False)

    def _stay_awake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _next(self) -> None:
        if self._exchange is not None:
            return
        end = self._buffer.find(_HEAD_END)
        is_endless = end < 0 and len(self._buffer) > _MAX_HEAD_BYTES
        if is_endless or self._buffer.startswith(b"PRI * HTTP/2"):  # routers try HTTP/2 first
            self.drop(abruptly=False)
            return
        if end < 0:
            return
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        start = end + len(_HEAD_END)
        stop = start + int(headers.get("content-length", 0))
        if len(self._buffer) < stop:
            return
        method, target, _ = lines[0].split(" ", 2)
        self._exchange = Exchange(self, method, target, headers, bytes(self._buffer[start:stop]))
        del self._buffer[:stop]
        self._handle(self._exchange)


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
