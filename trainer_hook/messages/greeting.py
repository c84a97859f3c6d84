"""How a process comes to the hub: who it is, and what it is told. Anyone to hub, and back."""

from trainer_hook.messages.base import Message
from trainer_hook.messages.streaming import Via
from trainer_hook.record import ExtraColumn


class Hello(Message):
    """First message on a connection to the hub."""

    protocol: int
    run: str
    token: str
    role: str
    """`rank` or `observer`."""
    pid: int
    schema: int
    """`schema_fingerprint()` of the attaching side, without a run's extra columns."""
    dp_rank: int = 0
    dp_size: int = 1
    peer: int = 0
    """Index among the processes of one dp_rank (tensor, context parallel); they get the same samples."""
    num_peers: int = 1
    node: int = 0
    """This rank's among those of the job that have a hub each."""
    num_nodes: int = 1


class Welcome(Message):
    """Answer to `Hello`; the ring's descriptor travels with it."""

    run: str
    attach: int
    """Number of this attachment."""
    ring_bytes: int
    step: int
    """Next step of this run to be trained."""
    version: int
    lineage: str
    groups_per_step: int
    samples_per_group: int
    update_interval: int
    num_steps: int
    weights_dir: str
    """Folder that this run's weight files go to."""
    stall_s: float
    """Longest wait of a rank for a batch before the hub names who waits for whom."""
    publish: Via = Via.DISK
    """How weights are pushed by default."""
    bucket_bytes: int = 128 << 20
    """Weights are gathered and sent in pieces of about this size."""
    node: int = 0
    """Whose prompts this run takes."""
    num_nodes: int = 1
    shares_engines: bool = False
    """With the other nodes; the first one's run leads."""
    spool_dir: str = ""
    """Folder for files that go between rank, hub and generator at a checkpoint."""
    checkpoint_bytes: int = 0
    """Most that a checkpoint keeps of unfinished groups."""
    columns: list[ExtraColumn] = []
    """What this run's records hold beyond the schema that all runs have."""


class Refused(Message, kw_only=True):
    """Answer to a `Hello` or a request that cannot be served."""

    request: int = 0
    error: str
    """Name of the error class in `shm.errors` or `trainer_hook.errors`."""
    text: str
