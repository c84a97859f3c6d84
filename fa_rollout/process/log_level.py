"""One level for the logs of all processes of a run: `fa-rollout-proc --log-level`, by the environment."""

import logging
import os
import sys
from types import TracebackType

from fa_rollout.process.masking import masked_text
from trainer_hook.printable import printable

VARIABLE = "FA_ROLLOUT_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
PLAIN = "warning"


def chosen() -> str:
    """The level that the environment names."""
    level = os.environ.get(VARIABLE, PLAIN)
    return level if level in LEVELS else PLAIN


def pass_on(level: str) -> None:
    """Processes that are started from now on log at this level."""
    os.environ[VARIABLE] = level


def configure(who: str) -> None:
    """Log to standard error, each line with the name of the process."""
    log_to_stderr(chosen(), f"{who} %(levelname)s %(name)s %(message)s")


def log_to_stderr(level: str, form: str) -> None:
    """Log so that no message can start a line of its own or act on the terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _Printable(logging.Formatter):
    """A message is one line; of a traceback, each line is indented, so that none looks like a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(masked_text(record.message))
        return super().formatMessage(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return "  " + printable(masked_text(super().formatException(ei)), lines=True).replace("\n", "\n  ")
