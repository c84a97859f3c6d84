"""What every generator does once it is open: the loop over the hub's messages, readiness, figures, the drain.

| who | waits for | unblocked by |
|---|---|---|
| a group | a slot among the samples | a sample that ends |
| a sample | its answers | the engines; the pool's deadlines |
| a finished group | room in the ring | `Tail` |
| the loop itself | nothing: not the ring, the engines, or user code | |

Invariant: every `Start`ed group is answered exactly once while the process lives, and at its end goes back to
the hub within the grace, whatever engines and user code do. The hub issues again what dies with a process.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import msgspec

from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config, from_dict
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import End, Life
from fa_rollout.generator.base.pulse import engine_figures, slowest_requests
from fa_rollout.generator.records.outbox import Outbox
from fa_rollout.generator.rollouts.dispatcher import Dispatcher, RunsGroups
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.job import GroupEnding, Job
from fa_rollout.generator.turns.requester import PartialPolicy, RequestCounts, Requester
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.user_code.guard import LoopGuard
from shm import RingWriter
from shm.ring.segment import Segment
from trainer_hook import messages as m
from trainer_hook.record import run_number

logger = logging.getLogger(__name__)


class ServingGenerator(ABC):
    """One life of a generator, after its start; a subclass adds how a group is made, and its own messages."""

    def __init__(
        self,
        config: Config,
        *,
        resume: m.Resume,
        link: HubLink,
        life: Life,
        book: VersionBook,
        writer: RingWriter,
        capacity: int,
        on_ended: Callable[[Job, GroupEnding], None] = lambda job, ending: None,
    ) -> None:
        """
        Args:
            capacity: samples that engines take at once.
            on_ended: takes each group that became no record, and why.
        """
        self._config = config
        self._resume, self._link, self._life = resume, link, life
        self._book = book
        self._capacity = capacity
        self._sending = Gate()
        self._dispatcher = Dispatcher(
            capacity=capacity,
            samples_per_group=config.rollout.samples_per_group,
            group_timeout_s=config.rollout.group_timeout_s,
            send=link.send,
            published_version=lambda: book.published,
            sending=self._sending,
            on_ended=on_ended,
        )
        self._outbox = Outbox(writer, send=link.send, on_backlog=self._dispatcher.on_backlog)
        self._pool: EnginePool | None = None
        self._requester: Requester | None = None
        """None where user code alone sends requests."""

    def _request_by(
        self,
        pool: EnginePool,
        *,
        seed: int | None,
        ends: Ends,
        context_length: int | None = None,
        keys_cache: bool = False,
    ) -> Requester:
        """Send requests over this pool; for the arguments see `Requester`."""
        self._pool = pool
        self._requester = Requester(
            pool,
            book=self._book,
            gate=self._sending,
            policy=PartialPolicy(resume=self._config.rollout.partial == "resume"),
            on_first_request=self._dispatcher.depart,
            seed=seed,
            ends=ends,
            context_length=context_length,
            keys_cache=keys_cache,
        )
        return self._requester

    # --- what a subclass adds ---------------------------------------------------------------------

    @property
    @abstractmethod
    def _groups(self) -> RunsGroups:
        """What carries groups out."""

    @abstractmethod
    def _services(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What else runs for as long as this life, by name."""

    @abstractmethod
    def _handle(self, message: m.Message, services: asyncio.TaskGroup) -> bool:
        """Act on a message, without waiting; False if it is unknown."""

    # --- the loop ---------------------------------------------------------------------------------

    async def serve(self) -> End:
        """Work until the end; returns why it ended."""
        work = self._services() | {"dispatcher": self._dispatcher.run(self._groups)}
        async with asyncio.TaskGroup() as services:
            running = [services.create_task(one, name=name) for name, one in work.items()]
            running.append(services.create_task(self._obey(services), name="hub"))
            self._link.send(self._ready())
            end = await self._life.ended()
            await self._drain(end)
            for task in running:
                task.cancel()
        return end

    async def _obey(self, services: asyncio.TaskGroup) -> None:
        """Pass every message on; waits only for the next one."""
        while True:
            match message := await self._link.receive():
                case m.Tail():
                    self._outbox.set_tail(message.position)
                case m.Drop():
                    self._dispatcher.drop(message.groups, message.reason)
                case m.EndEndless():
                    self._dispatcher.end_endless(message.limit_s, message.rule)
                case _:
                    if not self._handle(message, services):
                        logger.warning("event=message_ignored kind=%s", type(message).__name__)

    async def _drain(self, end: End) -> None:
        """No new request; ours are aborted at the engines; every group goes back to the hub."""
        logger.info("event=draining reason=%s groups=%d", end.reason, self._dispatcher.num_running)
        self._sending.hold("stopping")
        self._dispatcher.gate.hold("stopping")
        if self._requester is not None:
            await _abort(self._requester, end.grace_s / 2)
        self._dispatcher.give_back(end.reason)
        try:
            async with asyncio.timeout(end.grace_s / 4):
                await self._dispatcher.emptied()
                await self._link.flushed()
        except TimeoutError:
            logger.warning("event=drain_unfinished groups=%d", self._dispatcher.num_running)

    # --- figures ----------------------------------------------------------------------------------

    def _ready(self) -> m.GeneratorReady:
        engines = () if self._pool is None else self._pool.engines
        return m.GeneratorReady(
            incarnation=self._resume.incarnation,
            num_prompts=0,
            engines=[engine.url for engine in engines],
            spans=bool(engines) and all(engine.has_spans for engine in engines),
            concurrency=self._capacity,
        )

    def figures(self) -> m.Pulse:
        """What this generator does, without rates."""
        counts = RequestCounts() if self._requester is None else self._requester.counts
        pulse = m.Pulse(
            num_queued=self._dispatcher.num_queued,
            num_running=self._dispatcher.num_running,
            num_waiting_for_ring=self._outbox.num_waiting,
            records=self._outbox.num_written,
            slowest=self._dispatcher.oldest(),
            **asdict(counts),
        )
        if self._pool is None:
            return pulse
        pool = self._pool.statistics()
        return msgspec.structs.replace(
            pulse,
            in_flight=pool.num_in_flight,
            waiting_for_engines=pool.num_waiting,
            oldest_request_s=pool.oldest_age_s,
            is_paused=pool.is_paused,
            paused_s=pool.paused_s,
            engines=engine_figures(pool),
            slowest=pulse.slowest + slowest_requests(pool),
        )


async def _abort(requester: Requester, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await requester.abort_all()
            await requester.settled()
    except TimeoutError:
        logger.warning("event=abort_unanswered num_requests=%d", requester.num_under_way)


async def read_run(link: HubLink, life: Life, stack: AsyncExitStack) -> tuple[str, Config]:
    """The run's id and configuration from the hub's first frame; the loop is guarded from now on."""
    tree = msgspec.json.decode(await link.preamble())
    config = from_dict(tree["config"])
    life.grace_s = float(config.run.grace_s)
    stack.enter_context(LoopGuard(config.run.heartbeat_s / 2))
    return tree["run"], config


def ring_writer(config: Config, segment: Segment, resume: m.Resume, *, run: str, schema: int) -> RingWriter:
    """The ring's writer, which goes on where the life before has ended."""
    return RingWriter(
        segment,
        run=run_number(run),
        schema=schema,
        incarnation=resume.incarnation,
        head=resume.head,
        tail=resume.tail,
        sequence=resume.sequence,
        checksum_payload=config.ring.checksum_payload,
    )
