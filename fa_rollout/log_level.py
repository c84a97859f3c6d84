"""One level for the logs of all processes of a run: `fa-rollout-proc --log-level`, by the environment."""

import logging
import os
import sys

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
    logging.basicConfig(
        stream=sys.stderr, level=chosen().upper(), format=f"{who} %(levelname)s %(name)s %(message)s"
    )
