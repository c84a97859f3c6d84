"""Server-sent events of a streamed answer: only the last whole one counts, since payloads are cumulative."""

import msgspec

_END = b"\n\n"
_DATA = b"data:"
_DONE = b"[DONE]"


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 400


class _ErrorEvent(msgspec.Struct):
    error: _Error


class StreamError(Exception):
    """An error that came as an event, under HTTP status 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class LastEvent:
    """Keeps the last whole payload of a stream of cumulative ones."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.payload = b""
        self.is_done = False
        """True after `[DONE]`: the payload is the whole answer."""

    def feed(self, chunk: bytes) -> None:
        """More bytes of the stream.

        Raises:
            StreamError: an event tells an error.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += chunk
        end = self._rest.rfind(_END, searched)
        if end < 0:
            return
        events = bytes(self._rest[:end])
        del self._rest[: end + len(_END)]
        self._keep_last(events)

    def _keep_last(self, events: bytes) -> None:
        start = events.rfind(_END) + len(_END) if _END in events else 0
        last = _payload(events[start:])
        if last == _DONE:
            self.is_done = True
            if start == 0:
                return
            events = events[: start - len(_END)]
            start = events.rfind(_END) + len(_END) if _END in events else 0
            last = _payload(events[start:])
        if last.startswith(b'{"error"'):
            error = msgspec.json.decode(last, type=_ErrorEvent).error
            raise StreamError(error.code, error.message)
        self.payload = last or self.payload


def _payload(event: bytes) -> bytes:
    return event[len(_DATA) :].strip() if event.startswith(_DATA) else b""
