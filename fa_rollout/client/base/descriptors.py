"""File descriptors: each request in flight is a socket, so the soft limit is raised to what is needed."""

import logging
import resource

_LOG = logging.getLogger(__name__)

RESERVE = 256
"""Descriptors for everything else in the process: libraries, logs, pipes, the ring."""


def allowed_connections(wanted: int) -> int:
    """How many sockets may be open at once, at most `wanted`; raises the soft limit of open files as needed.

    Warns once when the hard limit leaves less than `wanted`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    ceiling = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if ceiling > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    allowed = min(wanted, max(1, ceiling - min(RESERVE, ceiling // 2)))
    if allowed < wanted:
        _LOG.warning(
            "event=concurrency_lowered wanted=%d allowed=%d hard_limit=%d; raise the hard limit (ulimit -Hn)",
            wanted,
            allowed,
            hard,
        )
    return allowed
