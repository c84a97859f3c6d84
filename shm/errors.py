"""The project's base error class, and the errors of shared memory and the control channel.

Every error is also a standard-library type, and has its text as the only argument, so it can be pickled. The
text states the rule, the value found, and the fix.
"""


class FaRolloutError(Exception):
    """Base class of all errors that this project raises."""


class ShmError(FaRolloutError):
    """Base class of the errors of segments, rings and channels."""


class SegmentError(ShmError, OSError):
    """Shared memory could not be created or attached; the text names the system call and the fix."""


class HeadroomError(ShmError, MemoryError):
    """The machine or its cgroup has too little memory."""


class RecordTooLarge(ShmError, ValueError):
    """A record is larger than the ring."""


class RingFull(ShmError, BlockingIOError):
    """The ring has no room for a record now."""


class DescriptorRefused(ShmError, ValueError):
    """A descriptor or record header is corrupt, foreign, replayed or out of bounds."""


class LeaseError(ShmError, ValueError):
    """A lease was ended twice, or by a process that does not hold it."""


class ChannelError(ShmError, ConnectionError):
    """A control connection violated the protocol."""


class ChannelClosed(ChannelError, EOFError):
    """The peer closed the connection or exited."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A send or receive reached its deadline although the peer is running."""


class HandshakeRefused(ChannelError, PermissionError):
    """The peer belongs to another user or run, or lacks the run's token."""


class MessageTooLarge(ChannelError, ValueError):
    """A message exceeds the size limit of the channel."""


class AttachTimeout(ShmError, TimeoutError):
    """The other side was not ready by the deadline; the text names the stage it reached."""
