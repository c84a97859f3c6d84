"""The HTTP session of a pool: no hidden limit of connections, no proxies, no cookies, both loopbacks."""

import os
import socket
import time
from email.utils import parsedate_to_datetime

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from fa_rollout.client.base.errors import AnswerTooLong
from fa_rollout.client.base.policy import KEY_STATUSES, FailurePolicy
from trainer_hook.printable import printable

_KEEP_IDLE_S = 4.0
"""SGLang's HTTP server drops idle connections after 5 s; a request must not race with that."""
KEY_VARIABLE = "FA_ROLLOUT_ENGINE_KEY"
"""The key of engines that were started with one; from the environment, so that no file has to hold it."""
_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def open_session(policy: FailurePolicy) -> aiohttp.ClientSession:
    """A session for engines; the caller closes it."""
    key = os.environ.get(KEY_VARIABLE)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_IDLE_S, resolver=LoopbackResolver(), ttl_dns_cache=60
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=policy.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        headers={"Authorization": f"Bearer {key}"} if key else None,
        skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        read_bufsize=1 << 18,
        auto_decompress=False,  # none is asked for, and a few bytes may inflate to any number
    )


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body of an answer.

    Raises:
        AnswerTooLong: it is longer; the rest is not read, and the connection ends.
    """
    length = response.content_length
    if length is not None and length > max_bytes:
        raise _too_long(max_bytes)
    chunks, num_bytes = [], 0
    async for chunk in response.content.iter_any():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_long(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_long(max_bytes: int) -> AnswerTooLong:
    return AnswerTooLong(f"an answer must end within {max_bytes} bytes")


async def read_start(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    """The first bytes of an error's body, as text on one line."""
    start = b""
    async for chunk in response.content.iter_any():
        start += chunk[: max_bytes - len(start)]
        if len(start) == max_bytes:
            break
    return printable(start.decode(errors="replace"))


def retry_after_s(response: aiohttp.ClientResponse) -> float:
    """When the server wants to be asked again: from now, in seconds or as a date; 0 where it does not say."""
    text = response.headers.get("Retry-After", "").strip()
    try:
        if text.isascii() and text.isdigit():
            return float(text[:9])
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def key_hint(status: int, variable: str = KEY_VARIABLE) -> str:
    """The way out for a server that wants another key; empty for any other status."""
    if status not in KEY_STATUSES:
        return ""
    said = "refuses the key in" if os.environ.get(variable) else "wants a key: set"
    return f" (it {said} the environment variable {variable})"


class LoopbackResolver(AbstractResolver):
    """`localhost` is both loopback addresses, whatever the hosts file lists (RFC 6761, section 6.3)."""

    def __init__(self) -> None:
        self._others = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a host."""
        if host.rstrip(".").casefold() != "localhost":
            return await self._others.resolve(host, port, family)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=0)
            for kind, address in _LOOPBACKS
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Nothing is held."""
