"""Server-sent events of a streamed answer: only the last whole one counts, since payloads are cumulative.

Lines end by line feeds, alone or behind carriage returns; comments, and fields other than `data`, are passed
over (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6).
"""

import re

import msgspec

_END = b"\n\n"
_DATA = b"data:"
_DONE = b"[DONE]"
_IS_ERROR = re.compile(rb'\{\s*"error"\s*:')
_UNKNOWN_ERROR = 400


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
        # No payload holds a bare carriage return: JSON escapes it.
        self._rest += chunk.replace(b"\r", b"")
        end = self._rest.rfind(_END, searched)
        if end < 0:
            return
        events = bytes(self._rest[:end])
        del self._rest[: end + len(_END)]
        self._keep_last(events)

    def _keep_last(self, events: bytes) -> None:
        """Take the last payload of several events; those before it are never looked at."""
        end = len(events)
        while end >= 0:
            before = events.rfind(_END, 0, end)
            payload = _payload(events[before + len(_END) if before >= 0 else 0 : end])
            end = before
            if payload == _DONE:
                self.is_done = True
            elif payload:
                if _IS_ERROR.match(payload):
                    raise _error(payload)
                self.payload = payload
                return


def _payload(event: bytes) -> bytes:
    """The data of an event, which SGLang sends on one line; empty for a comment."""
    for line in event.split(b"\n"):
        if line.startswith(_DATA):
            return line[len(_DATA) :].strip()
    return b""


def _error(payload: bytes) -> StreamError:
    """An error event, whose `error` is an object or a text, and whose code may be a number or be missing."""
    try:
        error = msgspec.json.decode(payload)["error"]
    except (msgspec.DecodeError, RecursionError):
        error = payload.decode(errors="replace")
    if not isinstance(error, dict):
        error = {"message": error}
    code = error.get("code")
    status = int(str(code)) if str(code).isdecimal() else _UNKNOWN_ERROR
    return StreamError(status, str(error.get("message"))[:500])
