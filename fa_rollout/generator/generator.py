"""The generator's parts put together, and its one loop over the hub's messages.

| who | waits for | unblocked by |
|---|---|---|
| a group | a place among the samples | a sample that ends |
| a sample | its answers | the engines; the pool's deadlines |
| every request | engines that stand still | `updates`, at the latest when the lease ends |
| a finished group | room in the ring | `Tail` |
| nothing of the loop | the ring, the engines, user code | |

Invariant: every `Start`ed group is answered exactly once while the process lives; what dies with it is the
hub's to give out again.
"""

import asyncio
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config
from fa_rollout.generator.base.error_text import tellable
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import End, Life
from fa_rollout.generator.base.pulse import Figures, engine_figures, slowest_requests
from fa_rollout.generator.drain import drain
from fa_rollout.generator.records.outbox import Outbox
from fa_rollout.generator.records.partials import PartialKeeper
from fa_rollout.generator.records.sample_log import SampleLog
from fa_rollout.generator.rollouts.dispatcher import Dispatcher
from fa_rollout.generator.rollouts.evaluator import Evaluator
from fa_rollout.generator.rollouts.execution import Executor
from fa_rollout.generator.rollouts.group import GroupRunner
from fa_rollout.generator.rollouts.rollout import Rollout
from fa_rollout.generator.startup import Parts, answer_ends
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.job import HeadStart
from fa_rollout.generator.turns.requester import PartialPolicy, Requester
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.generator.updates.engine_updates import EngineUpdates, pause_mode
from fa_rollout.generator.updates.following import FollowedUpdates, follows
from fa_rollout.generator.updates.membership import EngineChanges
from fa_rollout.user_code.failure import in_one_line
from shm import RingWriter
from trainer_hook import messages as m
from trainer_hook.record import columns_of, run_number, schema_fingerprint

logger = logging.getLogger(__name__)

SETTLE_S = 20.0
"""Longest wait for our aborted requests before an update, where engines tell no version spans."""


class Generator:
    """One life of the generator, after its start."""

    def __init__(
        self, config: Config, parts: Parts, *, run: str, resume: m.Resume, link: HubLink, life: Life
    ) -> None:
        self._parts = parts
        self._resume = resume
        self._link = link
        self._life = life
        has_spans = all(engine.has_spans for engine in parts.pool.engines)
        self._has_spans = has_spans
        mode = pause_mode(config.engine.pause_mode, has_spans=has_spans)
        book = VersionBook(lineage=resume.lineage, published=resume.version)
        self._sending = Gate()
        parts.rewards.warn = self._warn
        for name, patience in (("engines", parts.pool.patience), ("rewards", parts.rewards.patience)):
            patience.on_change = partial(self._sending.freeze, name)
        self._samples = SampleLog(config.run, name=run, incarnation=resume.incarnation, warn=self._warn)
        self._config = config
        self._dispatcher = Dispatcher(
            capacity=_capacity(config, parts.pool),
            samples_per_group=config.rollout.samples_per_group,
            group_timeout_s=config.rollout.group_timeout_s,
            send=link.send,
            published_version=lambda: book.published,
            sending=self._sending,
            on_ended=self._samples.ended,
        )
        self._requester = Requester(
            parts.pool,
            book=book,
            gate=self._sending,
            policy=PartialPolicy(resume=config.rollout.partial == "resume"),
            seed=config.sampling.seed,
            on_first_request=self._dispatcher.depart,
            context_length=parts.pool.context_length,
            ends=Ends(
                answer_ends(config, parts), lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=False)
            ),
            keys_cache=config.engine.cache_per_version,
        )
        self._outbox = Outbox(
            _ring_writer(config, parts, run, resume), send=link.send, on_backlog=self._dispatcher.on_backlog
        )
        executor = Executor(
            config,
            tokenizer=parts.tokenizer,
            rollout=Rollout(config, self._requester, parts.tokenizer, parts.generate),
            rewards=parts.rewards,
            context_length=parts.pool.context_length,
        )
        self._runner = GroupRunner(
            config,
            source=parts.source,
            executor=executor,
            group_filter=parts.group_filter,
            outbox=self._outbox,
            log=self._samples,
        )
        self._partials = PartialKeeper(config, self._requester, self._sending, warn=self._warn)
        self._evaluator = Evaluator(config, executor=executor, sending=self._sending, send=link.send)
        self._changes = EngineChanges(
            parts.pool,
            label=lambda: book.label(book.published),
            on_capacity=self._resize,
            send=link.send,
        )
        updates = FollowedUpdates if follows(config) else EngineUpdates
        self._updates = updates(
            parts.pool,
            requester=self._requester,
            book=book,
            gates=(self._sending, self._dispatcher.gate),
            mode=mode,
            settle_s=SETTLE_S,
            send=link.send,
        )

        self.strangers: list[str] = []
        """Engines that hold another run's weights: they get their first ones by an update."""

    async def serve(self) -> End:
        """Work until the end; returns why it ended."""
        async with asyncio.TaskGroup() as services:
            running = [
                services.create_task(self._dispatcher.run(self._runner), name="dispatcher"),
                services.create_task(self._updates.run(), name="updates"),
                services.create_task(self._samples.run(), name="sample-log"),
                services.create_task(self._parts.pool.until_taken(), name="taken"),
                services.create_task(self._obey(services), name="hub"),
            ]
            self._link.send(self._ready())
            end = await self._life.ended()
            await drain(
                end,
                sending=self._sending,
                dispatcher=self._dispatcher,
                requester=self._requester,
                link=self._link,
            )
            self._evaluator.drop_all()
            for task in running:
                task.cancel()
        return end

    # --- the hub's messages -----------------------------------------------------------------------

    async def _obey(self, services: asyncio.TaskGroup) -> None:
        """Hand every message to whom it concerns; nothing here waits but for the next one."""
        while True:
            self._handle(await self._link.receive(), services)

    def _handle(self, message: m.Message, services: asyncio.TaskGroup) -> None:
        match message:
            case m.Start():
                starts = [HeadStart(path=message.kept_path, entry=entry) for entry in message.kept]
                self._dispatcher.add(message.groups, starts)
            case m.SavePartials():
                services.create_task(self._save_partials(message), name="partials")
            case m.Tail():
                self._outbox.set_tail(message.position)
            case m.Drop():
                self._dispatcher.drop(message.groups, message.reason)
            case m.AbortRunning():
                services.create_task(self._abort(message), name="abort")
            case m.RunEvaluation():
                self._evaluator.begin(message, services)
            case m.DropEvaluation():
                self._evaluator.drop(message.evaluation)
            case m.ChangeEngines():
                self._changes.order(message, services)
            case m.PauseEngines() | m.EngineStage() | m.PublishWeights() | m.ContinueEngines():
                self._updates.order(message)
            case _:
                logger.warning("event=message_ignored kind=%s", type(message).__name__)

    async def _abort(self, message: m.AbortRunning) -> None:
        try:
            await self._requester.abort(self._dispatcher.request_ids(message.groups, message.member))
        except Exception as error:  # whatever it is: the requests end by themselves
            self._warn(f"requests were not aborted: {in_one_line(error)}")

    def _warn(self, text: str) -> None:
        """What serves the run failed, and the run goes on."""
        self._link.send(m.Warned(text=tellable(text)))

    async def _save_partials(self, message: m.SavePartials) -> None:
        self._link.send(await self._partials.save(message, self._dispatcher.running))

    def _resize(self) -> int:
        """Engines came or went: samples that they take at once now."""
        capacity = _capacity(self._config, self._parts.pool)
        self._dispatcher.resize(capacity)
        return capacity

    # --- figures ----------------------------------------------------------------------------------

    def _ready(self) -> m.GeneratorReady:
        return m.GeneratorReady(
            incarnation=self._resume.incarnation,
            num_prompts=len(self._parts.source),
            engines=[engine.url for engine in self._parts.pool.engines],
            spans=self._has_spans,
            concurrency=_capacity(self._config, self._parts.pool),
            known_engines=[asdict(engine) for engine in self._parts.pool.engines],
            first_weights=_first_weights(self._config, self._parts.pool),
            strangers=self.strangers,
        )

    def figures(self) -> Figures:
        """Where this generator stands."""
        pool, rewards = self._parts.pool.statistics(), self._parts.rewards.statistics()
        return Figures(
            num_queued=self._dispatcher.num_queued,
            num_running=self._dispatcher.num_running,
            num_waiting_for_ring=self._outbox.num_waiting,
            num_tokens=self._requester.counts.tokens,
            others=asdict(self._requester.counts)
            | {
                "records": self._outbox.num_written,
                "in_flight": pool.num_in_flight,
                "waiting_for_engines": pool.num_waiting,
                "oldest_request_s": pool.oldest_age_s,
                "paused_s": pool.paused_s,
                "is_paused": float(pool.is_paused),
                "evaluations": self._evaluator.num_running,
                "rewards_in_progress": rewards.num_in_progress,
                "rewards_failed": sum(rewards.num_failed.values()),
            },
            engines=engine_figures(pool),
            slowest=self._dispatcher.oldest() + slowest_requests(pool),
        )


def _capacity(config: Config, pool: EnginePool) -> int:
    """Samples of training that engines take at once: evaluations have their own beside them."""
    beside_evaluations = max(pool.capacity // 2, pool.capacity - config.evaluation.max_concurrent_samples, 1)
    return min(beside_evaluations, config.engine.max_concurrent_samples * len(pool.engines))


def _first_weights(config: Config, pool: EnginePool) -> str | None:
    """The folder of the weights that all engines started with, if that is one here."""
    paths = {engine.first_path for engine in pool.engines}
    if config.engine.model is not None and not all(engine.is_of_start for engine in pool.engines):
        paths = {config.engine.model}
    first = Path(paths.pop() or "") if len(paths) == 1 else Path()
    # A tokenizer may have a folder of its own.
    has_weights = any(first.glob("*.safetensors")) or any(first.glob("*.bin"))
    return str(first) if first != Path() and has_weights else None


def _ring_writer(config: Config, parts: Parts, run: str, resume: m.Resume) -> RingWriter:
    return RingWriter(
        parts.segment,
        run=run_number(run),
        schema=schema_fingerprint(columns_of(config.record.columns)),
        incarnation=resume.incarnation,
        head=resume.head,
        tail=resume.tail,
        sequence=resume.sequence,
        checksum_payload=config.ring.checksum_payload,
    )
