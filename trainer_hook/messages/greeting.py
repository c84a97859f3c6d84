"""The handshake between a process and the hub."""

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
    """Index of this rank's node, in a job with one hub per node."""
    num_nodes: int = 1


class Welcome(Message):
    """Answer to `Hello`; carries the ring's file descriptor."""

    run: str
    attach: int
    """Number of this attachment."""
    ring_bytes: int
    step: int
    """Next step of this run."""
    version: int
    lineage: str
    groups_per_step: int
    samples_per_group: int
    update_interval: int
    num_steps: int
    weights_dir: str
    """Folder for this run's weight files."""
    stall_s: float
    """Longest wait of a rank for a batch before the hub reports a stall."""
    publish: Via = Via.DISK
    """Default of `push(via=)`."""
    bucket_bytes: int = 128 << 20
    """Approximate size of a bucket of weights."""
    node: int = 0
    """The node whose prompts this run uses."""
    num_nodes: int = 1
    shares_engines: bool = False
    """Nodes share engines; the run of node 0 leads."""
    spool_dir: str = ""
    """Folder for checkpoint files between rank, hub and generator."""
    checkpoint_bytes: int = 0
    """Limit for unfinished groups in a checkpoint."""
    columns: list[ExtraColumn] = []
    """Extra columns of this run's records."""


class Refused(Message, kw_only=True):
    """Answer to a `Hello` or a request that cannot be served."""

    request: int = 0
    error: str
    """Name of the error class in `shm.errors` or `trainer_hook.errors`."""
    text: str
