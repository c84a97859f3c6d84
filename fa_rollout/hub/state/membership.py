"""Engines that join or leave a running run.

In: requests of observers and of the launcher. Out: orders to the generator, answers to the requests.
Invariant: every request is answered once. If a generator exits before it answers, the order is sent to its
replacement, which starts with the engines of the generator before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fa_rollout.account import events
from fa_rollout.account.events import Note
from trainer_hook.messages import ChangeEngines, EnginesChanged, EnginesNow, Message, Refused

Answer = Callable[[Message], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRequest:
    order: ChangeEngines
    """With the hub's own request number."""
    request: int
    answer: Answer


class EngineMembership:
    """The engines of a run."""

    def __init__(self, *, note: Note, warn: Callable[[str], None], to_generator: Answer) -> None:
        self._note, self._warn, self._to_generator = note, warn, to_generator
        self.urls: list[str] = []
        """Engines in use; empty: those of the configuration."""
        self.down: list[str] = []
        """Engines that exited, according to the launcher, and do not listen again yet."""
        self.known = b""
        """What the last generator found out about the engines, for its replacement."""
        self._open: dict[int, _OpenRequest] = {}
        self.num_changes = 0
        """Requests that were granted."""
        self._last = 0
        self._is_up = False

    def request(self, message: ChangeEngines, answer: Answer = lambda message: None) -> None:
        """Ask the generator to add or remove an engine."""
        self._last += 1
        order = ChangeEngines(
            request=self._last, url=message.url, joins=message.joins, drain_s=message.drain_s
        )
        self._open[self._last] = _OpenRequest(order=order, request=message.request, answer=answer)
        self._note(events.EngineChanged(url=message.url, joins=message.joins, phase="asked"))
        if self._is_up:
            self._to_generator(order)

    def changed(self, message: EnginesChanged) -> None:
        """Handle the generator's answer."""
        found = self._open.pop(message.request, None)
        if found is None:
            return  # an earlier generator has answered it just before it exited
        joins, url, error = found.order.joins, message.url, message.error
        self.urls = message.engines
        self.num_changes += error is None
        phase: Literal["done", "refused"] = "done" if error is None else "refused"
        self._note(events.EngineChanged(url=url, joins=joins, phase=phase, error=error))
        if error is not None:
            self._warn(f"engine {url} could not {'join' if joins else 'leave'}: {error}")
            found.answer(Refused(request=found.request, error="HookError", text=error))
        else:
            found.answer(
                EnginesNow(request=found.request, engines=message.engines, concurrency=message.concurrency)
            )

    def generator_is_up(self, known: bytes) -> None:
        """A generator has started: send it the open orders."""
        self._is_up, self.known = True, known
        for request in self._open.values():
            self._to_generator(request.order)

    def generator_is_gone(self) -> None:
        """The generator has exited."""
        self._is_up = False
