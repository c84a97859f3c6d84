"""What the generator and its agent workers say: frames over an inherited socket.

A frame is a length (4 bytes) and a message. Down go `Setup`, then `Begin` and `Cancel`, pickled, since a row
may hold any object; up come `Ready` or `Refused`, then `Ended` and `Retiring`, as JSON: a worker runs user
code, and what it sends is checked.
"""

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """First frame to a worker."""

    agent: str | None
    """Dotted path of the user's function."""
    command: list[str] | None
    """Or the program."""
    sys_path: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Start a session."""

    ticket: int
    address: str
    secret: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a session; it is answered by `Ended` all the same."""

    ticket: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The agent is loaded."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot be loaded."""

    text: str


class Ended(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A session is over."""

    ticket: int
    reward: float | None = None
    """What the agent returned."""
    failure: str | None = None
    """What went wrong, and where."""
    at: str | None = None
    """Where it was when it was cancelled."""


class Retiring(msgspec.Struct, frozen=True, tag=True):
    """A session ignored its end: the worker takes no more sessions."""


Up = Ready | Refused | Ended | Retiring
_DECODER = msgspec.json.Decoder(Up)


def down(message: Any) -> bytes:
    """A frame to a worker; raises whatever the pickling of a row raises."""
    return _framed(pickle.dumps(message, protocol=5))


def up(message: Up) -> bytes:
    """A frame to the generator."""
    return _framed(msgspec.json.encode(message))


async def read_down(reader: asyncio.StreamReader) -> Any:
    """The next message; EOFError (IncompleteReadError) at the end."""
    return pickle.loads(await _payload(reader))


async def read_up(reader: asyncio.StreamReader) -> Up:
    """The next message; EOFError at the end, msgspec.MsgspecError where it is none."""
    return _DECODER.decode(await _payload(reader))


def _framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


async def _payload(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
