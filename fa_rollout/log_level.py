"""One level for the logs of all processes of a run: `fa-rollout-proc --log-level`, by the environment."""

import logging
import os
import sys

VARIABLE = "FA_ROLLOUT_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")


def pass_on(level: str) -> None:
    """Processes that are started from now on log at this level."""
    os.environ[VARIABLE] = level


def configure(who: str) -> None:
    """Log to standard error, each line with the name of the process."""
    level = os.environ.get(VARIABLE, "info")
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper() if level in LEVELS else logging.INFO,
        format=f"{who} %(levelname)s %(name)s %(message)s",
    )
