"""What all hook calls share: one connection, one turn at a time, and what says which calls may be made.

Invariant: a call runs alone, on a usable hook, after the records that became free were reported and what
the hub had to say was read. In a forked child nothing runs and nothing is reported: records and connection
are the parent's.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shm.fork import disarm_in_children
from shm.ring.reader import RingReader
from trainer_hook import messages as m
from trainer_hook.batches.leases import Leases
from trainer_hook.errors import HookStateError
from trainer_hook.record import columns_of, run_number, schema_fingerprint
from trainer_hook.session.attach import Attached
from trainer_hook.session.connection import Connection

log = logging.getLogger("trainer_hook")

REPLY_TIMEOUT_S = 30.0
STALL_MARGIN_S = 15.0
"""The hub names a stall itself when `stall_s` is over; if it does not, the hook does, this much later."""
_FORKED = (
    "this hook belongs to the process that attached it; a forked child (such as a DataLoader worker) may "
    "read its tensors but makes no hook call: attach in the child, or call from the parent"
)

A = TypeVar("A", bound=m.Message)
Request = Callable[[int], m.Message]
"""Makes a request of its number."""


class Session:
    """A rank's attachment to a hub."""

    def __init__(self, attached: Attached) -> None:
        welcome = attached.welcome
        self.name = attached.name
        self.is_alone = attached.is_alone
        """No other rank is in this run."""
        self.connection = Connection(attached.channel)
        self.columns = columns_of(welcome.columns)
        """Of this run's records."""
        self.reader = RingReader(
            attached.segment, run=run_number(welcome.run), schema=schema_fingerprint(self.columns)
        )
        self.leases = Leases()
        self.wait_timeout_s = welcome.stall_s + STALL_MARGIN_S
        """For waits that the hub bounds by `stall_s`."""
        self.inside: str | None = None
        """The block that is open, in words."""
        self._segment = attached.segment
        self._lock = threading.Lock()
        self._holder: int | None = None
        """Thread that makes a call now."""
        self._unusable: str | None = None
        disarm_in_children(self)

    @contextmanager
    def call(self, *, outside: bool = False) -> Iterator[None]:
        """A hook call. `outside`: it cannot be made inside a block.

        Raises:
            HookStateError: the hook is closed or was inherited by a fork, a block is open, or another call of
                this thread is running.
            HookError: what ended the run, by its own class.
        """
        with self._turn():
            if self._unusable is not None:
                raise HookStateError(self._unusable)
            if outside and self.inside is not None:
                raise HookStateError(f"leave {self.inside} first: this call cannot be made inside its block")
            self.connection.check()
            self.report_returned()
            yield

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            raise HookStateError(
                "a hook call cannot be made while another one of the same thread runs, as from a signal "
                "handler: set a flag there and look at it between two calls, or raise"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    @contextmanager
    def leaving(self) -> Iterator[bool]:
        """The end of a block; gives whether the hub can still be told of it."""
        with self._turn():
            self.inside = None
            yield self._unusable is None

    def ask(self, request: Request, answer: type[A], *, waits_for: str, timeout_s: float) -> A:
        """Send the request that is made of a number, and return its answer."""
        found = self.connection.ask(
            request(self.connection.next_number()),
            timeout_s=timeout_s,
            waits_for=f"{self.name} waits for {waits_for}",
        )
        assert isinstance(found, answer)
        return found

    def ask_alone(self, request: Request, answer: type[A], *, timeout_s: float = REPLY_TIMEOUT_S) -> A:
        """A whole call of one request, which is answered at once by default."""
        with self.call():
            return self.ask(request, answer, waits_for="its answer", timeout_s=timeout_s)

    def report_returned(self) -> None:
        """Tell the hub which records of ended steps became free."""
        for step, sequences in self.leases.take_returned().items():
            self.connection.post(m.Released(step=step, outcome=None, sequences=sequences))

    def close(self, *, in_order: bool = True) -> None:
        """Leave the run; idempotent. Not `in_order`: the hub is to take it for a death."""
        with self._turn():
            if self._unusable is not None:
                return
            self.report_returned()
            self._keep_views()
            if in_order:
                self.connection.post(m.Goodbye())
            self._let_go("the hook is closed: attach a new one")

    def _keep_views(self) -> None:
        try:
            self.leases.keep_views()
        except OSError as error:
            log.warning("views_outlive_hook num_records=%d error=%s", self.leases.num_held, error)

    def disarm(self) -> None:
        """Become inert, in a forked child."""
        self._lock = threading.Lock()  # a thread that the child does not have may hold the old one
        self._holder = None
        self._let_go(_FORKED)

    def _let_go(self, why: str) -> None:
        self._unusable = why
        self.connection.close()
        self._segment.close()
