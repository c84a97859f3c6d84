"""The one error root of the project, and the errors of shared memory and of the control channel.

Every error is also a standard-library type, carries its text as its only argument (so that it can be
pickled) and says what must hold, what was found and what to do.
"""


class FaRolloutError(Exception):
    """Root of every error that this project raises on purpose."""


class ShmError(FaRolloutError):
    """Root of the errors of segments, rings and channels."""


class SegmentError(ShmError, OSError):
    """Shared memory that could not be made or attached; the text names the system call and the way out."""


class HeadroomError(ShmError, MemoryError):
    """The machine or its cgroup has no room for the memory asked for."""


class RecordTooLarge(ShmError, ValueError):
    """A record that can never fit the ring, however empty it is."""


class RingFull(ShmError, BlockingIOError):
    """A record that fits the ring, but not now."""


class DescriptorRefused(ShmError, ValueError):
    """A descriptor or a record header that is corrupt, foreign, replayed or out of bounds."""


class LeaseError(ShmError, ValueError):
    """A lease that was ended twice, or by somebody who does not hold it."""


class ChannelError(ShmError, ConnectionError):
    """A control connection that broke a rule of the protocol."""


class ChannelClosed(ChannelError, EOFError):
    """The peer closed the connection, or died."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A send or receive that did not end by its deadline, though the peer lives."""


class HandshakeRefused(ChannelError, PermissionError):
    """A peer of another user, another run, or without the run's token."""


class MessageTooLarge(ChannelError, ValueError):
    """A message beyond the size limit of the channel."""


class AttachTimeout(ShmError, TimeoutError):
    """The other side was not ready by the deadline; the text says which stage it had reached."""
