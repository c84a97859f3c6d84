"""Engine addresses: any way people write a host and port becomes one base URL."""

from urllib.parse import urlsplit

from fa_rollout.client.base.errors import ClientError
from fa_rollout.process.masking import masked_text

DEFAULT_PORT = 30000


class AddressError(ClientError, ValueError):
    """An engine address that cannot be read."""


def engine_url(address: str, *, default_port: int = DEFAULT_PORT) -> str:
    """`http://host:port` of an address: `host`, `host:port`, `::1`, `[::1]:port` or a whole URL.

    A path is kept (an engine behind a prefix), query and user are refused.

    Raises:
        AddressError: no host, no number as port, or parts that an engine address cannot have.
    """
    text = address.strip()
    scheme, mark, rest = text.partition("://")
    if not mark:
        scheme, rest = "http", text
    rest = rest.rstrip("/")
    host_port, slash, path = rest.partition("/")
    if host_port.count(":") > 1 and not host_port.startswith("["):
        host_port = f"[{host_port}]"  # a bare IPv6 address: its colons are not a port
    try:
        parts = urlsplit(f"{scheme}://{host_port}{slash}{path}")
        port, host = parts.port or default_port, parts.hostname
    except ValueError as error:
        raise AddressError(_complaint(address, str(error))) from None
    if scheme not in ("http", "https") or not host:
        raise AddressError(_complaint(address, "it has no host" if not host else f"its scheme is {scheme}"))
    if parts.query or parts.fragment or parts.username is not None:
        raise AddressError(_complaint(address, "it has a query, a fragment or a user"))
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{slash}{path}"


def _complaint(address: str, found: str) -> str:
    return (
        f"an engine address must be host:port or http://host:port, found {masked_text(address)!r} ({found})"
    )
