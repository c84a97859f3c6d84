"""Requests to the hub, their answers, and unrequested messages of the hub.

In: messages to send and numbers of requests to wait for. Out: answers; an error of the hub is raised as its
own class.

Invariant: every wait ends with an answer, the hub's exit or its deadline. The answer to an abandoned request
(its caller was interrupted) is dropped, never matched to another request.
"""

import itertools
import logging
import time

from shm import errors as shm_errors
from shm.channels.channel import Channel
from shm.errors import ChannelError, ChannelTimeout, FaRolloutError, MessageTooLarge
from trainer_hook import errors as hook_errors
from trainer_hook.errors import HookError, HubLost, Stalled
from trainer_hook.messages import (
    Fatal,
    Message,
    Notice,
    Ping,
    Pong,
    Progress,
    Refused,
    Stop,
    decode,
    encode,
)
from trainer_hook.printable import printable

log = logging.getLogger("trainer_hook")

SEND_TIMEOUT_S = 2.0
"""A running hub always reads. Messages that a stopped hub does not read are sent by a later call."""


def error_named(name: str, text: str) -> FaRolloutError:
    """The error that a peer names; a HookError that quotes the name if it is not ours."""
    shown = printable(text, lines=True)
    kind = getattr(hook_errors, name, None) or getattr(shm_errors, name, None)
    if isinstance(kind, type) and issubclass(kind, FaRolloutError):
        return kind(shown)
    return HookError(f"{name}: {shown}")


class Connection:
    """Requests and answers over a channel, in the calling thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._awaited: set[int] = set()
        self._answers: dict[int, Message] = {}
        self._end: tuple[str, str] | None = None
        """Name and text of the error that every later call raises."""

    def next_number(self) -> int:
        """A number for a request."""
        return next(self._numbers)

    def post(self, message: Message) -> None:
        """Send a message. `check` or the next wait reports a lost hub, not this call.

        Raises:
            MessageTooLarge: the message exceeds the channel's limit.
        """
        if self._end is not None:
            return
        try:
            self._channel.send(encode(message), timeout_s=SEND_TIMEOUT_S)
        except MessageTooLarge:
            raise
        except ChannelTimeout:
            log.warning("hub_reads_nothing message=%s", type(message).__name__)
        except ChannelError as error:
            self._read_rest()
            self._lose(error)

    def begin(self, request: Message) -> None:
        """Send a request whose answer `wait` will return, now or in a later call."""
        self._awaited.add(_number(request))
        self.post(request)

    def ask(self, request: Message, *, timeout_s: float, waits_for: str) -> Message:
        """Send a request and wait for its answer. Raises like `wait`."""
        try:
            self.begin(request)
            return self.wait(_number(request), timeout_s=timeout_s, waits_for=waits_for)
        finally:
            self.forget(_number(request))

    def wait(self, number: int, *, timeout_s: float, waits_for: str) -> Message:
        """The answer to a request sent by `begin`. After Stalled, waiting can be repeated.

        Raises:
            Stalled: no answer arrived in time.
            HubLost: the hub exited.
            HookError: the hub refused the request or the run failed; raised as its own class.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._read_rest()
            if number in self._answers:
                break
            self._raise_end()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise Stalled(
                    f"the hub must answer within {timeout_s:.0f} s; {waits_for}, and no answer came although "
                    "the hub is running: it may be stopped or starved; see its log"
                )
            self._read(left_s)
        self._awaited.discard(number)
        answer = self._answers.pop(number)
        if isinstance(answer, Refused):
            raise error_named(answer.error, answer.text)
        return answer

    def is_pending(self, number: int) -> bool:
        """Whether a request was sent and its answer was not read yet."""
        return number in self._awaited

    def has_arrived(self, number: int) -> bool:
        """Whether `wait` for this request would return immediately; reads pending messages first."""
        self._read_rest()
        return number in self._answers or self._end is not None

    def fileno(self) -> int:
        """Readable when a message of the hub arrives."""
        return self._channel.fileno()

    def forget(self, number: int) -> None:
        """Abandon this request: its answer is dropped."""
        self._awaited.discard(number)
        self._answers.pop(number, None)

    def check(self) -> None:
        """Read pending messages without waiting. Raises the error that ended the run, if any."""
        self._read_rest()
        self._raise_end()

    def _raise_end(self) -> None:
        if self._end is not None:
            raise error_named(*self._end)

    def close(self) -> None:
        """Close this process's end."""
        self._end = self._end or ("HookStateError", "the hook is closed: call TrainerHook.attach again")
        self._channel.close()

    def _read(self, timeout_s: float) -> None:
        try:
            self._take(decode(self._channel.receive(timeout_s)))
        except ChannelTimeout:
            return
        except ChannelError as error:
            self._lose(error)

    def _read_rest(self) -> None:
        if self._end is not None:
            return
        try:
            for payload in self._channel.read_ready():
                self._take(decode(payload))
        except ChannelError as error:
            self._lose(error)

    def _take(self, message: Message) -> None:
        match message:
            case Notice():
                log.warning("hub_notice text=%s", message.text)
            case Progress():
                log.info("progress %s", message.text)
            case Ping():
                self.post(Pong(number=message.number))
            case Fatal():
                self._end = (message.error, message.text)
            case Stop():
                self._end = ("HubLost", f"the run was stopped: {message.reason}")
            case _ if (number := _number(message)) in self._awaited:
                self._answers[number] = message
            case _:
                log.debug("dropped_answer type=%s", type(message).__name__)

    def _lose(self, error: Exception) -> None:
        if self._end is None:
            self._end = (
                HubLost.__name__,
                f"the hub must run as long as the trainer; it exited ({error}): views of the ring stay "
                "valid; start the run again from the trainer's last checkpoint",
            )


def _number(message: Message) -> int:
    number: int = getattr(message, "request", 0)
    return number
