"""Server-sent events of a streamed answer: only the last whole one counts, since payloads are cumulative.

Lines end by line feeds, alone or behind carriage returns; comments, and fields other than `data`, are passed
over (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6).
"""

import re

import msgspec

from fa_rollout.client.base.errors import AnswerTooLong
from fa_rollout.client.wire.verdict import Verdict, verdict_of

_END = b"\n\n"
_DATA = b"data:"
_DONE = b"[DONE]"
_IS_ERROR = re.compile(rb'\{\s*"error"\s*:')
_UNKNOWN_ERROR = 400


class LastEvent:
    """Keeps the last whole payload of a stream of cumulative ones."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one event."""
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self.payload = b""
        self.is_done = False
        """True after `[DONE]`: the payload is the whole answer."""

    def feed(self, chunk: bytes) -> None:
        """More bytes of the stream.

        Raises:
            Verdict: an event tells an error.
            AnswerTooLong: an event does not end.
        """
        searched = max(0, len(self._rest) - 1)
        # No payload holds a bare carriage return: JSON escapes it.
        self._rest += chunk.replace(b"\r", b"")
        end = self._rest.rfind(_END, searched)
        if end < 0:
            if len(self._rest) > self._max_bytes:
                raise AnswerTooLong(f"an answer must end within {self._max_bytes} bytes")
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


def _error(payload: bytes) -> Verdict:
    """An error event; one whose status is missing is about this very request."""
    try:
        told = verdict_of(msgspec.json.decode(payload))
    except (msgspec.DecodeError, RecursionError):
        told = None
    told = told or Verdict(None, payload[:500].decode(errors="replace"))
    return Verdict(told.status or _UNKNOWN_ERROR, told.text)
