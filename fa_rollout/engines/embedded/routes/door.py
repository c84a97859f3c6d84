"""Who may ask: checked of every request, before its body is read.

| refused | with | because |
|---|---|---|
| a Host that is another's name | 403 | a web page can have its own name point here (DNS rebinding) |
| an Origin, or a fetch, of another site | 403 | a web page can send what it cannot read the answer to |
| no key, or a wrong one, where there is one | 401 | other users reach a loopback address too |
| a body that is not declared as JSON | 415 | a web page can send other bodies without asking first |

Invariant: no handler runs for a request that is refused.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from fa_rollout.engines.embedded.routes.http import json_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OWN_FETCHES = (None, "none", "same-origin")


def door(*, key: str | None, host: str, has_open_health: bool = False) -> Middleware:
    """The checks of a server that was told to listen on `host`; without a key none is asked for."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = None if has_open_health and request.path == "/health" else key
        refusal = _foreign(request, host) or _unknown(request, wanted) or _not_json(request)
        return await handler(request) if refusal is None else refusal

    return check


def _foreign(request: web.Request, host: str) -> web.Response | None:
    name = _name_of(f"//{request.headers.get(hdrs.HOST, '')}")
    if not (name == host.lower() or name == "localhost" or _is_address(name)):
        return _refused(403, "Host must be an address of this server, or localhost.")
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and urlsplit(origin).netloc != request.headers.get(hdrs.HOST):
        return _refused(403, "Origin must be this server.")
    if request.headers.get("Sec-Fetch-Site") not in _OWN_FETCHES:
        return _refused(403, "requests of other sites are not answered.")
    return None


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_address(name: str | None) -> bool:
    """An address cannot be made to point elsewhere."""
    try:
        ipaddress.ip_address(name or "")
    except ValueError:
        return False
    return True


def _unknown(request: web.Request, key: str | None) -> web.Response | None:
    if key is None:
        return None
    kind, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if kind.lower() == "bearer" and hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        return None
    return _refused(401, "the key of the run must be given: Authorization: Bearer KEY.")


def _not_json(request: web.Request) -> web.Response | None:
    if request.can_read_body and request.content_type != "application/json":
        return _refused(415, "Content-Type must be application/json.")
    return None


def _refused(status: int, message: str) -> web.Response:
    return json_response({"error": message}, status=status)
