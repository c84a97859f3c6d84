"""Progress lines during the start of a run: what it waits for.

In: the configuration, and a call of `look` a few times a second. Out: lines for the user. Invariant: nothing
here blocks, and nothing depends on it: the generator decides when the run can start.
"""

import time
from collections.abc import Callable, Sequence

from fa_rollout.config import Config
from fa_rollout.engines.alive import Question

_ASK_S = 3.0
_PATH = "/health"


class StartLines:
    """Reports which engines do not answer yet, or that the generator is still loading."""

    def __init__(self, config: Config, urls: Sequence[str], say: Callable[[str], None]) -> None:
        self._limit_s = config.engine.start_limit_s
        self._every_s = config.trainer.progress_s
        self._urls = [url if "://" in url else f"http://{url}" for url in urls]
        self._say = say
        self._began_s = self._said_s = time.monotonic()
        self._questions: list[Question] | None = None

    def look(self) -> None:
        """Call it while the generator is not ready."""
        now_s = time.monotonic()
        if not self._every_s or now_s - self._said_s < self._every_s:
            return
        if self._questions is None:
            asked = [url for url in self._urls if url.startswith("http://")]
            self._questions = [Question(url, _PATH, _ASK_S) for url in asked]
        if all(question.is_over for question in self._questions):
            self._said_s = now_s
            self._say(self._line(now_s - self._began_s))
            self._questions = None

    def _line(self, passed_s: float) -> str:
        silent = [question.url for question in self._questions or () if question.status is None]
        if not silent:
            return f"waiting for the generator, which reads the data and imports your code ({passed_s:.0f} s)"
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        limit = f"{passed_s:.0f} s of {self._limit_s:g} s, engine.start_limit_s"
        return f"waiting for the engines: {silent[0]}{more} does not answer ({limit})"
