"""The HTTP session of a pool: no hidden limit of connections, no proxies, no cookies, both loopbacks."""

import os
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from fa_rollout.client.base.policy import FailurePolicy

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
    )


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
