"""Engines that join or leave a run while it goes on: what was asked, and what became of it.

In: wishes of observers and of the launcher. Out: orders to the generator, answers to who asked. Invariant:
every wish is answered once; one that a generator did not live to answer is given to the next; the next life
begins with the engines that the last one had.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fa_rollout.account import events
from fa_rollout.account.events import Note
from trainer_hook.messages import ChangeEngines, EnginesChanged, EnginesNow, Message, Refused

Answer = Callable[[Message], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    order: ChangeEngines
    """Under the hub's own number."""
    request: int
    answer: Answer


class Roster:
    """The engines of a run."""

    def __init__(self, *, note: Note, warn: Callable[[str], None], to_generator: Answer) -> None:
        self._note, self._warn, self._to_generator = note, warn, to_generator
        self.urls: list[str] = []
        """What a generator asks; empty: what the configuration says."""
        self.down: list[str] = []
        """Engines that the launcher has seen die, and that do not listen again yet."""
        self.known = b""
        """What a generator found out about engines, for the next one."""
        self._open: dict[int, _Wish] = {}
        self.num_changes = 0
        """Wishes that came true."""
        self._last = 0
        self._is_up = False

    def wish(self, message: ChangeEngines, answer: Answer = lambda message: None) -> None:
        """Somebody wants an engine to join or to leave."""
        self._last += 1
        order = ChangeEngines(
            request=self._last, url=message.url, joins=message.joins, drain_s=message.drain_s
        )
        self._open[self._last] = _Wish(order=order, request=message.request, answer=answer)
        self._note(events.EngineChanged(url=message.url, joins=message.joins, phase="asked"))
        if self._is_up:
            self._to_generator(order)

    def changed(self, message: EnginesChanged) -> None:
        """The generator has done it, or could not."""
        wish = self._open.pop(message.request, None)
        if wish is None:
            return  # a life before answered, too, as it died
        joins, url, error = wish.order.joins, message.url, message.error
        self.urls = message.engines
        self.num_changes += error is None
        phase: Literal["done", "refused"] = "done" if error is None else "refused"
        self._note(events.EngineChanged(url=url, joins=joins, phase=phase, error=error))
        if error is not None:
            self._warn(f"engine {url} could not {'join' if joins else 'leave'}: {error}")
            wish.answer(Refused(request=wish.request, error="HookError", text=error))
        else:
            wish.answer(
                EnginesNow(request=wish.request, engines=message.engines, concurrency=message.concurrency)
            )

    def generator_is_up(self, known: bytes) -> None:
        """A life begins: it gets what is open."""
        self._is_up, self.known = True, known
        for wish in self._open.values():
            self._to_generator(wish.order)

    def generator_is_gone(self) -> None:
        """A life ended."""
        self._is_up = False
