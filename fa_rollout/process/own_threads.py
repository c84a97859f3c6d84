"""Our own thread pool, for the generator's file access, name look-ups and long copies.

User code may fill the loop's default executor (`asyncio.to_thread`) with calls that never end; our calls must
not queue behind them.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 8
_THREADS = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="fa-rollout")
NUM_USER_THREADS = 256
"""Size of the default executor: it grows with use, and a call that never ends occupies a thread forever."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, in threads that user code cannot fill."""
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
