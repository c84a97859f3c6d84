"""Control messages to bytes and back."""

import msgspec

from shm.errors import ChannelError
from trainer_hook.messages.base import PROTOCOL, Message


def _all_messages() -> tuple[type[Message], ...]:
    return tuple(Message.__subclasses__())


_ENCODER = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Message] | None" = None


def encode(message: Message) -> bytes:
    """Message to bytes, without the channel's length prefix."""
    return _ENCODER.encode(message)


def decode(payload: bytes | bytearray | memoryview) -> Message:
    """Bytes to a message.

    Raises:
        ChannelError: the bytes are no message of this protocol.
    """
    global _decoder
    if _decoder is None:
        union = _all_messages()[0]
        for kind in _all_messages()[1:]:
            union = union | kind  # type: ignore[assignment]
        _decoder = msgspec.msgpack.Decoder(union)
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ChannelError(
            f"a control message must be one of protocol {PROTOCOL}; found {len(payload)} bytes that are not "
            f"({error}); the peer is of another release or is no part of fa_rollout"
        ) from error
