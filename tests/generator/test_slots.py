"""Slots: never more taken than there are, in order of arrival, whatever is cancelled or resized."""

import asyncio
from collections.abc import Awaitable, Callable

from fa_rollout.generator.base.slots import Slots


class Crowd:
    """People who take a place and keep it until they are let go."""

    def __init__(self, slots: Slots) -> None:
        self._places = slots
        self.inside: list[int] = []
        self._exits: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, *names: int) -> None:
        for name in names:
            self._exits[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name))
            await asyncio.sleep(0)

    async def _stay(self, name: int) -> None:
        async with self._places:
            self.inside.append(name)
            try:
                await self._exits[name].wait()
            finally:
                self.inside.remove(name)

    async def leave(self, *names: int) -> None:
        for name in names:
            self._exits[name].set()
            await asyncio.wait({self.tasks[name]})
        await asyncio.sleep(0)

    async def give_up(self, name: int) -> None:
        self.tasks[name].cancel()
        await asyncio.wait({self.tasks[name]})
        await asyncio.sleep(0)


def play(limit: int, scene: Callable[[Slots, Crowd], Awaitable[None]]) -> None:
    async def main() -> None:
        slots = Slots(limit)
        crowd = Crowd(slots)
        await scene(slots, crowd)
        await crowd.leave(*[name for name, task in crowd.tasks.items() if not task.done()])

    asyncio.run(main())


def test_first_come_first_served() -> None:
    async def scene(slots: Slots, crowd: Crowd) -> None:
        await crowd.come(1, 2, 3, 4)
        assert crowd.inside == [1, 2]
        await crowd.leave(2)
        assert crowd.inside == [1, 3]

    play(2, scene)


def test_more_places_let_those_in_who_wait() -> None:
    async def scene(slots: Slots, crowd: Crowd) -> None:
        await crowd.come(1, 2, 3)
        slots.resize(3)
        await asyncio.sleep(0)
        assert crowd.inside == [1, 2, 3]

    play(1, scene)


def test_fewer_places_put_nobody_out_and_let_nobody_in() -> None:
    async def scene(slots: Slots, crowd: Crowd) -> None:
        await crowd.come(1, 2, 3, 4)
        slots.resize(1)
        await crowd.leave(1, 2)
        assert crowd.inside == [3]
        await crowd.leave(3)
        assert crowd.inside == [4]

    play(3, scene)


def test_who_gives_up_waiting_takes_no_place_along() -> None:
    async def scene(slots: Slots, crowd: Crowd) -> None:
        await crowd.come(1, 2, 3)
        await crowd.give_up(2)
        await crowd.leave(1)
        assert crowd.inside == [3]

    play(1, scene)


def test_who_gives_up_as_a_place_is_given_hands_it_on() -> None:
    async def scene(slots: Slots, crowd: Crowd) -> None:
        await crowd.come(1, 2, 3)
        crowd._exits[1].set()
        await asyncio.sleep(0)  # 1 is on its way out, and 2 has been given its place
        await crowd.give_up(2)
        await asyncio.sleep(0)
        assert crowd.inside == [3]

    play(1, scene)
