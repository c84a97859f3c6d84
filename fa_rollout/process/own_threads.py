"""Threads of this project's own, for files, name look-ups and long copies of the generator.

User code fills the loop's default executor (`asyncio.to_thread`), with calls that may never end: nothing of
ours waits behind it.
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
"""Of the default executor: it grows as it is used, and a call that never ends keeps one for good."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, in threads that user code cannot fill."""
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)
