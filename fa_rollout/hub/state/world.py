"""The trainer's processes as the hub knows them: who is attached, who leads, who waits.

Invariant: all attachments of one world agree on its size, and no batch leaves before all of them are here.
"""

from dataclasses import dataclass, field
from typing import Any

from trainer_hook.messages import Hello, Next, TakeState, UpdateEnter, UpdatePassed, UpdatePublish

Key = tuple[int, int]
"""(data-parallel rank, index among the peers that share it)."""


@dataclass(slots=True, kw_only=True)
class Attachment:
    """One connected rank."""

    number: int
    hello: Hello
    connection: Any
    """The server's end of its channel; opaque here."""
    waiting: Next | None = None
    waiting_since_s: float = 0.0
    saving: TakeState | None = None
    """Its request for a state, which counts a step that another rank has not left."""
    saving_since_s: float = 0.0
    entered_update: UpdateEnter | UpdatePassed | UpdatePublish | None = None
    """Its request inside the update that is going on."""
    has_state: bool = False
    closing: bool = False
    leases: set[int] = field(default_factory=set)

    @property
    def key(self) -> Key:
        return (self.hello.dp_rank, self.hello.peer)

    @property
    def name(self) -> str:
        peer = f", peer {self.hello.peer}" if self.hello.num_peers > 1 else ""
        return f"rank {self.hello.dp_rank}{peer} (pid {self.hello.pid})"


class World:
    """The attachments of one life of the trainer."""

    def __init__(self, num_ranks: int | None) -> None:
        self._configured = num_ranks
        self.members: dict[Key, Attachment] = {}
        self.shape: tuple[int, int] | None = None
        """(dp_size, num_peers) that the first rank told."""
        self.needs_state = False
        """The run has trained steps: a new trainer must load its checkpoint before it gets a batch."""
        self.is_broken = False
        """A member is gone; the others are told and no batch leaves until all have left."""
        self.closed: list[str] = []
        """Members that left in order while others stay."""

    def refusal(self, hello: Hello) -> str | None:
        """Why a rank may not join; None when it may."""
        if self.is_broken:
            names = ", ".join(member.name for member in self.members.values())
            return f"the ranks of the trainer's last life must leave first; still attached: {names}"
        if self._configured is not None and hello.dp_size != self._configured:
            found = f"rank {hello.dp_rank} says {hello.dp_size}"
            return f"dp_size must be trainer.num_ranks = {self._configured}, {found}"
        shape = (hello.dp_size, hello.num_peers)
        if self.shape is not None and shape != self.shape:
            found = f"rank {hello.dp_rank} says {shape}"
            return f"all ranks must agree on (dp_size, num_peers) = {self.shape}, {found}"
        if not (0 <= hello.dp_rank < hello.dp_size and 0 <= hello.peer < hello.num_peers):
            found = f"dp_rank {hello.dp_rank} of {hello.dp_size}, peer {hello.peer} of {hello.num_peers}"
            return f"a rank must lie below its size, found {found}"
        other = self.members.get((hello.dp_rank, hello.peer))
        if other is not None:
            return f"rank {hello.dp_rank} peer {hello.peer} is attached already, by pid {other.hello.pid}"
        return None

    def join(self, attachment: Attachment) -> None:
        """Take a rank in."""
        self.shape = (attachment.hello.dp_size, attachment.hello.num_peers)
        self.members[attachment.key] = attachment

    def leave(self, attachment: Attachment) -> None:
        """A rank is gone; the last one to go makes room for a new world."""
        self.members.pop(attachment.key, None)
        self.closed.append(attachment.name)
        if not self.members:
            self.shape = None
            self.is_broken = False
            self.closed.clear()

    @property
    def dp_size(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def num_missing(self) -> int:
        """Ranks that have not attached yet."""
        return self.shape[0] * self.shape[1] - len(self.members) if self.shape else 1

    @property
    def is_complete(self) -> bool:
        return self.num_missing == 0 and not self.is_broken

    @property
    def leader(self) -> Attachment | None:
        """The rank that pushes weights and whose checkpoint counts."""
        return self.members.get((0, 0))

    def waiting(self) -> list[Attachment]:
        """Ranks that wait for a batch."""
        return [member for member in self.members.values() if member.waiting is not None]

    def saving(self) -> list[Attachment]:
        """Ranks that wait for a state."""
        return [member for member in self.members.values() if member.saving is not None]
