"""State shared by all hook calls: the connection, the lock, and whether the hook is usable.

Invariant: a call runs alone, on a usable hook, after released records were reported and pending messages of
the hub were read. In a forked child no call runs and nothing is reported: the parent owns records and
connection.
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
"""The hub reports a stall after `stall_s`; the hook reports it this much later if the hub does not."""
_FORKED = (
    "hook calls must be made by the process that attached; this is a forked child (such as a DataLoader "
    "worker), which can only read tensors: attach in the child, or call from the parent"
)

A = TypeVar("A", bound=m.Message)
Request = Callable[[int], m.Message]
"""Creates a request from its number."""


class Session:
    """A rank's attachment to a hub."""

    def __init__(self, attached: Attached) -> None:
        welcome = attached.welcome
        self.name = attached.name
        self.is_alone = attached.is_alone
        """This is the run's only rank."""
        self.connection = Connection(attached.channel)
        self.columns = columns_of(welcome.columns)
        """Columns of this run's records."""
        self.reader = RingReader(
            attached.segment, run=run_number(welcome.run), schema=schema_fingerprint(self.columns)
        )
        self.leases = Leases()
        self.wait_timeout_s = welcome.stall_s + STALL_MARGIN_S
        """For waits that the hub bounds by `stall_s`."""
        self.inside: str | None = None
        """The open block, for messages."""
        self._segment = attached.segment
        self._lock = threading.Lock()
        self._holder: int | None = None
        """Thread that is making a call."""
        self._unusable: str | None = None
        disarm_in_children(self)

    @contextmanager
    def call(self, *, outside: bool = False) -> Iterator[None]:
        """Guards a hook call. `outside`: the call is not allowed inside a block.

        Raises:
            HookStateError: the hook is closed or was inherited by a fork, a block is open, or another call of
                this thread is running.
            HookError: the error that ended the run, as its own class.
        """
        with self._turn():
            if self._unusable is not None:
                raise HookStateError(self._unusable)
            if outside and self.inside is not None:
                raise HookStateError(
                    f"this call must be made outside a block; found {self.inside} open: leave its block first"
                )
            self.connection.check()
            self.report_returned()
            yield

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._holder == threading.get_ident():
            raise HookStateError(
                "hook calls of one thread must not be nested; this call interrupts another, as from a signal "
                "handler: set a flag in the handler and check it between calls, or raise"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    @contextmanager
    def leaving(self) -> Iterator[bool]:
        """Guards the end of a block; yields whether it can still be reported to the hub."""
        with self._turn():
            self.inside = None
            yield self._unusable is None

    def ask(self, request: Request, answer: type[A], *, waits_for: str, timeout_s: float) -> A:
        """Send the request, and return its answer."""
        found = self.connection.ask(
            request(self.connection.next_number()),
            timeout_s=timeout_s,
            waits_for=f"{self.name} waits for {waits_for}",
        )
        assert isinstance(found, answer)
        return found

    def ask_alone(self, request: Request, answer: type[A], *, timeout_s: float = REPLY_TIMEOUT_S) -> A:
        """A hook call of a single request."""
        with self.call():
            return self.ask(request, answer, waits_for="its answer", timeout_s=timeout_s)

    def report_returned(self) -> None:
        """Report released records of ended steps to the hub."""
        for step, sequences in self.leases.take_returned().items():
            self.connection.post(m.Released(step=step, outcome=None, sequences=sequences))

    def close(self, *, in_order: bool = True) -> None:
        """Leave the run; idempotent. Not `in_order`: the hub treats it as a crash."""
        with self._turn():
            if self._unusable is not None:
                return
            self.report_returned()
            self._keep_views()
            if in_order:
                self.connection.post(m.Goodbye())
            self._let_go("the hook is closed: call TrainerHook.attach again")

    def _keep_views(self) -> None:
        try:
            self.leases.keep_views()
        except OSError as error:
            log.warning("views_outlive_hook num_records=%d error=%s", self.leases.num_held, error)

    def disarm(self) -> None:
        """Make this hook unusable, in a forked child."""
        self._lock = threading.Lock()  # a thread that does not exist in the child may hold the old lock
        self._holder = None
        self._let_go(_FORKED)

    def _let_go(self, why: str) -> None:
        self._unusable = why
        self.connection.close()
        self._segment.close()
