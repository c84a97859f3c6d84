"""A process group of the trainer's leader and the engines' workers, separate from the trainer's groups.

In: an address and a name that all members know. Out: broadcasts from rank 0, the leader.

SGLang creates its side with `rendezvous`, a `PrefixStore` of the group's name and torch's helper for new
groups; the store keys match only if this side does the same. Invariant: every wait has a deadline, and
`leave` releases members that wait for this one.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from trainer_hook.messages import GROUP_TIMEOUT_S

if TYPE_CHECKING:
    import torch

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class UpdateGroup:
    """One member of a group; call `leave` when done."""

    def __init__(self, name: str, group: Any, store: Any) -> None:
        self.name = name
        self._group = group
        self._pid = os.getpid()
        self._store = store  # served by rank 0: must exist as long as the group

    @classmethod
    def join(
        cls,
        store: Any,
        *,
        address: str,
        name: str,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> Self:
        """Join the other members at the store of this address; blocks until all have joined.

        Raises:
            RuntimeError: a member did not join in time.
        """
        c10d = _c10d()
        with _gloo_beside(address):
            group, _ = (
                c10d._new_process_group_helper(  # the only way to create a group outside the default group
                    world_size,
                    rank,
                    [],
                    c10d.Backend(backend),
                    c10d.PrefixStore(name, store),
                    group_name=name,
                    timeout=timedelta(seconds=timeout_s),
                )
            )
        c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
        return cls(name, group, store)

    def broadcast(self, tensor: "torch.Tensor") -> Any:
        """Start to send this tensor (rank 0) or to receive it; in the same order on every member.

        Returns torch's work handle.
        """
        return _c10d().broadcast(tensor, group=self._group, group_src=0, async_op=True)

    def leave(self, *, abort: bool = False) -> None:
        """Close this side; idempotent. `abort`: cancel running broadcasts."""
        if os.getpid() != self._pid:
            return  # a forked child: the group's threads belong to the parent
        group, self._group = self._group, None
        if group is None:
            return
        with suppress(RuntimeError):  # another member has left already
            if abort:
                group.abort()
            _c10d().destroy_process_group(group)


def serve_store(address: str, timeout_s: float = GROUP_TIMEOUT_S) -> tuple[Any, int]:
    """A store for the members, and its port; served by this process on this address only."""
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port = int(listener.getsockname()[1])
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            use_libuv=True,
            master_listen_fd=listener.detach(),  # by default it listens on all addresses
        )
    return store, port


def meeting_address(urls: Sequence[str]) -> str:
    """The address of this machine that all these engines can reach; loopback if all of them are local."""
    found = [own_address(url) for url in urls]
    return next((address for address in found if not _is_loopback(address)), found[0])


def find_store(
    address: str, port: int, *, rank: int, world_size: int, timeout_s: float = GROUP_TIMEOUT_S
) -> Any:
    """The store of another process.

    Raises:
        RuntimeError: it was not reachable in time.
    """
    host = f"[{address}]" if ":" in address else address
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(_c10d().rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def own_address(url: str) -> str:
    """This machine's source address for packets to the host of `url`."""
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


@contextmanager
def _gloo_beside(address: str) -> Iterator[None]:
    """Make gloo listen on loopback for a loopback group; by default it uses the host name's address."""
    if _GLOO_INTERFACE in os.environ or not _is_loopback(address):
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def _c10d() -> Any:
    """torch's module of process groups; the functions needed are neither public nor typed."""
    from torch.distributed import distributed_c10d

    return distributed_c10d
