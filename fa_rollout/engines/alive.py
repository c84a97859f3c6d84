"""Checks in the background whether a server answers. Uses no HTTP library, so that the launcher stays light.

Invariant: a check never blocks the caller; time in which the caller itself did not poll does not count.
"""

import http.client
import os
import threading
import time
from urllib.parse import urlsplit

from fa_rollout.engines.service import Service, ServiceError
from fa_rollout.engines.with_key import KEY_VARIABLE

_PATH = "/model_info"
"""Answered during a pause too, unlike a health check."""
_ASK_EVERY_S = 5.0
_LONGEST_LOOK_S = 2.0
"""Longest time that counts between two polls."""


class Question:
    """One GET request, in its own thread."""

    def __init__(self, url: str, path: str, timeout_s: float) -> None:
        self.url = url
        parts = urlsplit(url)
        # Proxy variables of the environment do not reach http.client.
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        self._path = path
        self.status: int | None = None
        """None before the answer, or if the request failed."""
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _ask(self) -> None:
        try:
            self._connection.request("GET", self._path, headers=_with_key())
            self.status = self._connection.getresponse().status
        except (OSError, http.client.HTTPException):
            pass
        finally:
            self._connection.close()


def _with_key() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class ParentListener:
    """Detects a server that stops answering: one that hangs must be replaced like one that died."""

    def __init__(self, service: Service, limit_s: float) -> None:
        self._service = service
        self._limit_s = limit_s
        self._question: Question | None = None
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def look(self) -> None:
        """Call it a few times a second.

        Raises:
            ServiceError: the server did not answer within the limit.
        """
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        if self._question is not None and self._question.is_over:
            if self._question.status is not None:
                self._silent_s = 0.0
            self._question = None
        if self._silent_s > self._limit_s:
            name, url = self._service.name, self._service.url
            raise ServiceError(f"{name} did not answer at {url} for {self._limit_s:g} s")
        if self._question is None and self._silent_s >= min(_ASK_EVERY_S, self._limit_s / 4):
            self._question = Question(self._service.url, _PATH, self._limit_s)
