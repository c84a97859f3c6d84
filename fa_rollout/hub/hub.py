"""The hub's mind: messages in, messages out, no sockets.

| who | waits for | unblocked by |
|---|---|---|
| a rank in `next_batch` | all ranks, a closed batch, the end of an update | `Batch`, `Ended`, or `Refused` at the stall deadline |
| a rank in `update_weights` | see `updates.py` | |
| the generator | credits, ring space | `Start`, `Tail` |
| the hub | nobody | |

Invariant: after each event `advance` leaves nothing to do: all credits are issued, every batch that can close is
closed, every free byte of the ring is announced.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fa_rollout.config import Config
from fa_rollout.data.order import epoch_order
from fa_rollout.hub.books import Counts, Stream
from fa_rollout.hub.composition import Wait
from fa_rollout.hub.event_log import EventLog
from fa_rollout.hub.flow import Flow, TooManyFailures
from fa_rollout.hub.steps import Steps
from fa_rollout.hub.updates import Phase, Updates
from fa_rollout.hub.world import Attachment, World
from shm.ring import RingTable
from trainer_hook import messages as m


class Outbox(Protocol):
    """Where the hub's messages go; none of these calls blocks or fails."""

    def to_rank(self, rank: Attachment, message: m.Message) -> None: ...

    def to_generator(self, message: m.Message) -> None: ...

    def end(self, exit_code: int, text: str) -> None:
        """The run is over: stop everything, tell the launcher."""


class Hub:
    """Run state and the answers to every message."""

    def __init__(
        self, config: Config, *, run: str, directory: Path, table: RingTable, outbox: Outbox, log: EventLog
    ) -> None:
        self.config = config
        self.run = run
        self.outbox = outbox
        self.log = log
        self.table = table
        self.ring_bytes = table.statistics().size_bytes
        self.lineage = secrets.token_hex(4)
        self.weights_dir = directory / "weights"
        self.world = World(config.trainer.num_ranks)
        self.updates = Updates(
            world=self.world,
            directory=self.weights_dir,
            lease_s=config.trainer.pause_lease_s,
            to_rank=outbox.to_rank,
            to_generator=outbox.to_generator,
        )
        self.flow: Flow | None = None
        """None until the first generator has read the data."""
        self.steps = Steps(config, self.world, outbox.to_rank)
        self.pulse: m.Pulse | None = None
        self.fatal: m.Fatal | None = None
        self._told_tail = 0
        self._num_attached = 0
        self._pending_load: tuple[Attachment, m.LoadState] | None = None
        self._last_wait = "the generator to read the data and reach the engines"
        self._ring_stuck_since_s: float | None = None
        self._warned_lease: int | None = None

    # --- ranks ------------------------------------------------------------------------------------

    def hello(self, hello: m.Hello, connection: Any) -> Attachment | m.Refused:
        """A rank comes."""
        if self.fatal is not None:
            return m.Refused(error=self.fatal.error, text=self.fatal.text)
        refusal = self.world.refusal(hello)
        if refusal is not None:
            return m.Refused(error="HookStateError", text=refusal)
        self._num_attached += 1
        rank = Attachment(number=self._num_attached, hello=hello, connection=connection)
        self.world.join(rank)
        self.log.write("attached", rank=hello.dp_rank, peer=hello.peer, pid=hello.pid, attach=rank.number)
        return rank

    def welcome(self, rank: Attachment) -> m.Welcome:
        """What a rank needs to know."""
        rollout = self.config.rollout
        return m.Welcome(
            run=self.run,
            attach=rank.number,
            ring_bytes=self.ring_bytes,
            step=self.flow.step if self.flow else 0,
            version=self.flow.version if self.flow else 0,
            lineage=self.lineage,
            groups_per_step=rollout.groups_per_step,
            samples_per_group=rollout.samples_per_group,
            update_interval=rollout.update_interval,
            num_steps=rollout.num_steps,
            weights_dir=str(self.weights_dir),
            stall_s=self.config.trainer.stall_s,
        )

    def from_rank(self, rank: Attachment, message: m.Message) -> None:
        """A rank speaks."""
        match message:
            case m.Next():
                self._next(rank, message)
            case m.Released():
                self._released(rank, message)
            case m.UpdateEnter():
                self._with_flow(rank, message.request, lambda flow: self.updates.enter(rank, message, flow))
            case m.UpdatePause():
                self.updates.pause(rank, message)
            case m.UpdatePublish():
                self.updates.publish(rank, message)
            case m.UpdateCancel():
                self.updates.cancel(rank, message)
            case m.Abort():
                self._with_flow(rank, message.request, lambda flow: self._abort(rank, message, flow))
            case m.Hold():
                self._with_flow(rank, message.request, lambda flow: self._hold(rank, message, flow))
            case m.Query():
                self._query(rank, message)
            case m.LoadState():
                self._load(rank, message)
            case m.Goodbye():
                rank.closing = True
            case m.Ping():
                self.outbox.to_rank(rank, m.Pong(number=message.number))
            case m.Pong():
                pass
            case _:
                self.outbox.to_rank(
                    rank,
                    m.Refused(error="HookStateError", text=f"a rank may not send {type(message).__name__}"),
                )

    def rank_gone(self, rank: Attachment) -> None:
        """A rank's process or connection ended: its leases return; without a goodbye the others are told."""
        for sequence in self.table.release_all(rank.number):
            self.log.write("released", sequence=sequence, attach=rank.number)
        self.world.leave(rank)
        self.updates.left(rank)
        self.log.write("left", rank=rank.hello.dp_rank, attach=rank.number, in_order=rank.closing)
        in_order = rank.closing and self.steps.next_step(rank) is None
        if self.world.members and not in_order:
            self.world.is_broken = True
            for member in self.world.members.values():
                text = f"{rank.name} is gone; the other ranks cannot go on"
                self.outbox.to_rank(member, m.Fatal(error="PeerLost", text=text))
        if self.flow is not None and (self.world.is_broken or not self.world.members):
            for step in list(self.flow.open_steps.values()):
                self.flow.returned(step)
            self.steps.forget()
            self.world.needs_state = self.flow.step > 0

    # --- the generator ----------------------------------------------------------------------------

    def from_generator(self, message: m.Message) -> None:
        """The generator speaks."""
        match message:
            case m.GeneratorReady():
                self._generator_ready(message)
            case m.Pulse():
                self.pulse = message
            case m.Warned():
                self.warn(message.text)
            case m.GaveUp():
                self.give_up("GeneratorFailed", f"the generator gave up: {message.text}")
            case m.EnginesPaused():
                self.updates.paused()
            case m.UpdateFailed():
                self.updates.failed(message.text)
            case m.Ping() | m.Pong():
                pass
            case _:
                assert self.flow is not None, "the generator speaks of groups before it is ready"
                self._group_news(message, self.flow)

    def _group_news(self, message: m.Message, flow: Flow) -> None:
        match message:
            case m.Commit():
                warning = flow.commit(message)
                self.log.write(
                    "committed", group=message.group, attempt=message.attempt, sequence=message.sequence
                )
                if warning:
                    self.warn(warning)
            case m.Dispatched():
                flow.books.dispatched(message.groups, message.version)
                self.log.write("dispatched", groups=message.groups, version=message.version)
            case m.Settled():
                self.log.write(
                    message.outcome, group=message.group, attempt=message.attempt, reason=message.reason
                )
                try:
                    flow.settle(message)
                except TooManyFailures as error:
                    self.give_up("GeneratorFailed", str(error))
            case m.WeightsPublished():
                if self.updates.published(message, flow):
                    self.log.write("published", version=message.version, bubble_s=message.bubble_s)
                    self._drop_hopeless(flow)

    def generator_gone(self, how: str, *, will_restart: bool) -> None:
        """The generator's life ended; all that it sent was handled before."""
        lost = self.flow.generator_died() if self.flow else []
        self.log.write("generator_died", how=how, requeued=[group.group for group in lost])
        self.pulse = None
        if will_restart:
            self.warn(f"the generator ended {how}; {len(lost)} groups start again with the next one")
        else:
            self.give_up("GeneratorFailed", f"the generator ended {how} and was restarted too often")

    def resume_message(self) -> m.Resume:
        """Where a new generator begins; only when the last one is provably gone and all it sent is handled."""
        head, sequence = self.table.restart()
        self._told_tail = self.table.tail
        return m.Resume(
            incarnation=self.table.incarnation,
            head=head,
            tail=self.table.tail,
            sequence=sequence,
            version=self.flow.version if self.flow else 0,
            lineage=self.lineage,
            weights=self.updates.weights,
        )

    def _generator_ready(self, message: m.GeneratorReady) -> None:
        self.log.write("generator_ready", incarnation=message.incarnation, engines=message.engines)
        if self.flow is None:
            self.flow = self._new_flow(message.num_prompts)
        elif self.flow.books.stream.num_prompts != message.num_prompts:
            known = self.flow.books.stream.num_prompts
            self.give_up(
                "GeneratorFailed",
                f"the data must not change while a run goes on: it had {known} rows, now {message.num_prompts}",
            )
        if self._pending_load is not None:
            (rank, load), self._pending_load = self._pending_load, None
            self._load(rank, load)
        self.updates.generator_is_back()

    def _new_flow(self, num_prompts: int) -> Flow:
        data = self.config.data
        stream = Stream(
            num_prompts=num_prompts,
            epochs=data.epochs,
            order=lambda epoch: epoch_order(num_prompts, epoch, seed=data.seed, shuffle=data.shuffle),
        )
        return Flow(self.config, stream, self.table, lineage=self.lineage)

    def _drop_hopeless(self, flow: Flow) -> None:
        """Under `drop`, work that passed the bound while it runs is stopped at once."""
        if flow.rules.policy != "drop":
            return
        oldest = flow.version - flow.rules.staleness
        late = [g.group for g in flow.books.running() if g.version is not None and g.version < oldest]
        if late:
            self.outbox.to_generator(m.Drop(groups=late, reason=f"older than version {oldest}"))

    # --- requests ---------------------------------------------------------------------------------

    def _next(self, rank: Attachment, message: m.Next) -> None:
        if self.world.needs_state and not rank.has_state:
            step = self.flow.step if self.flow else 0
            text = (
                f"this run has trained {step} steps: a trainer that joins it must call "
                "hook.load_state_dict(checkpoint) before its first batch"
            )
            self.outbox.to_rank(rank, m.Refused(request=message.request, error="HookStateError", text=text))
            return
        rank.waiting, rank.waiting_since_s = message, time.monotonic()

    def _released(self, rank: Attachment, message: m.Released) -> None:
        for sequence in message.sequences:
            self.table.release(sequence, rank.number)
        if message.outcome is not None and self.flow is not None:
            step = self.steps.finish(rank, message, self.flow)
            if step is not None:
                self.log.write(message.outcome, step=step.step, version=step.version, groups=step.names)

    def _abort(self, rank: Attachment, message: m.Abort, flow: Flow) -> None:
        running = flow.books.running()
        if message.group is not None:
            running = [g for g in running if g.group == message.group]
        if message.older_than is not None:
            running = [g for g in running if g.version is not None and g.version < message.older_than]
        names = [group.group for group in running]
        if names:
            self.outbox.to_generator(m.AbortRunning(groups=names))
        self.outbox.to_rank(rank, m.Reply(request=message.request, value=len(names)))

    def _hold(self, rank: Attachment, message: m.Hold, flow: Flow) -> None:
        flow.held = message.held
        self.outbox.to_rank(rank, m.Reply(request=message.request))

    def _query(self, rank: Attachment, message: m.Query) -> None:
        if message.what == "statistics":
            self.outbox.to_rank(rank, m.Reply(request=message.request, value=self.statistics()))
            return
        self._with_flow(rank, message.request, lambda flow: self._state(rank, message, flow))

    def _state(self, rank: Attachment, message: m.Query, flow: Flow) -> None:
        done = self.steps.next_step(rank)
        state = flow.state(flow.step if done is None else done)
        self.outbox.to_rank(rank, m.Reply(request=message.request, value=state))

    def _load(self, rank: Attachment, message: m.LoadState) -> None:
        if self.flow is None:
            self._pending_load = (rank, message)
            return
        flow = self.flow
        if rank is self.world.leader:
            if flow.open_steps:
                text = "a checkpoint must be loaded before the first batch of a trainer's life"
                refused = m.Refused(request=message.request, error="HookStateError", text=text)
                self.outbox.to_rank(rank, refused)
                return
            self.lineage = secrets.token_hex(4)
            dropped = flow.load(message.state, lineage=self.lineage)
            self.log.write("loaded", step=flow.step, version=flow.version, cursor=flow.books.cursor)
            if dropped:
                names = [group.group for group in dropped]
                self.outbox.to_generator(m.Drop(groups=names, reason="an older checkpoint was loaded"))
        rank.has_state = True
        value = {"step": message.state["step"], "version": message.state["version"], "lineage": self.lineage}
        self.outbox.to_rank(rank, m.Reply(request=message.request, value=value))

    def _with_flow(self, rank: Attachment, request: int, action: Callable[[Flow], None]) -> None:
        if self.flow is not None:
            action(self.flow)
            return
        text = "the generator is not ready yet: it reads the data and looks for the engines; ask again later"
        self.outbox.to_rank(rank, m.Refused(request=request, error="HookStateError", text=text))

    # --- after each event -------------------------------------------------------------------------

    def advance(self) -> None:
        """Do all that the last events made possible."""
        if self.flow is None or self.fatal is not None:
            return
        assignments = self.flow.issue()
        if assignments:
            self.log.write("issued", groups=[a.group for a in assignments])
            self.outbox.to_generator(m.Start(groups=assignments))
        if self.updates.phase is Phase.IDLE:
            self._serve(self.flow)
        else:
            self._refuse_crossed()
        if self.table.tail != self._told_tail:
            self._told_tail = self.table.tail
            self.outbox.to_generator(m.Tail(position=self._told_tail))

    def _serve(self, flow: Flow) -> None:
        """Give waiting ranks their part, composing the step when none asked for it before."""
        if flow.all_composed:
            self.steps.end(flow)
        if self.world.closed:
            names = ", ".join(self.world.closed)
            self._refuse_waiting(
                "PeerLost", f"a batch needs all ranks, and these closed their hooks: {names}"
            )
        if not self.world.is_complete:
            self._last_wait = f"{self.world.num_missing} ranks of the trainer to attach"
            return
        for rank in self.world.waiting():
            outcome = self.steps.serve(rank, flow, self.table)
            if isinstance(outcome, Wait):
                self._last_wait = outcome.reason
                starved = flow.starved()
                if starved is not None:
                    self._refuse_waiting("Stalled", starved)
            elif outcome is not None:
                self.log.write(
                    "handed",
                    step=outcome.step,
                    version=outcome.version,
                    groups=outcome.names,
                    attach=rank.number,
                )
        # A hand-over opens the window for further groups.
        assignments = flow.issue()
        if assignments:
            self.log.write("issued", groups=[a.group for a in assignments])
            self.outbox.to_generator(m.Start(groups=assignments))

    def _refuse_crossed(self) -> None:
        """Ranks in different calls would wait for one another for ever."""
        waiting = self.world.waiting()
        if self.updates.phase is Phase.ENTERING and waiting:
            entered = [r.name for r in self.world.members.values() if r.entered_update is not None]
            if len(entered) + len(waiting) == len(self.world.members):
                text = f"all ranks must call update_weights together: {', '.join(entered)} did, the others ask for a batch"
                self._refuse_waiting("HookStateError", text)

    def _refuse_waiting(self, error: str, text: str) -> None:
        for rank in self.world.waiting():
            assert rank.waiting is not None
            self.outbox.to_rank(rank, m.Refused(request=rank.waiting.request, error=error, text=text))
            rank.waiting = None

    def tick(self, now_s: float) -> None:
        """Deadlines: called a few times a second."""
        stall_s = self.config.trainer.stall_s
        for rank in self.world.waiting():
            if now_s - rank.waiting_since_s > stall_s and rank.waiting is not None:
                text = f"{rank.name} waited {stall_s:.0f} s for a batch (trainer.stall_s): {self.waits_for()}"
                self.outbox.to_rank(rank, m.Refused(request=rank.waiting.request, error="Stalled", text=text))
                rank.waiting = None
        self._watch_ring(now_s)
        self._watch_leases()

    def _watch_leases(self) -> None:
        """One old lease holds the whole ring back: name it, and end the run at the deadline."""
        obstacle = self.table.obstacle()
        if obstacle is None or not obstacle.holders:
            self._warned_lease = None
            return
        names = [r.name for r in self.world.members.values() if r.number in obstacle.holders]
        text = (
            f"record {obstacle.sequence} ({obstacle.length} bytes) has been leased by {', '.join(names)} for "
            f"{obstacle.age_s:.0f} s and holds {obstacle.stuck_bytes} free bytes of the ring back"
        )
        if obstacle.age_s > self.config.ring.lease_deadline_s:
            self.give_up(
                "Stalled",
                f"{text}; a batch must end within ring.lease_deadline_s, or be taken with copy=True",
            )
        elif obstacle.age_s > self.config.ring.lease_warning_s and self._warned_lease != obstacle.sequence:
            self._warned_lease = obstacle.sequence
            self.warn(f"{text}; drop the views of its batch, or take batches with copy=True")

    def _watch_ring(self, now_s: float) -> None:
        """A ring too small for one step stands still for good: say so."""
        stuck = (
            self.pulse is not None
            and self.pulse.num_waiting_for_ring > 0
            and self.pulse.num_running == 0
            and bool(self.world.waiting())
            and not (self.flow and self.flow.open_steps)
        )
        if not stuck:
            self._ring_stuck_since_s = None
            return
        self._ring_stuck_since_s = self._ring_stuck_since_s or now_s
        if now_s - self._ring_stuck_since_s > 2.0:
            mean = self.flow.meter.mean_record_bytes if self.flow else 0.0
            need = int(self.config.rollout.groups_per_step * mean * 1.5)
            self._refuse_waiting(
                "Stalled",
                f"the ring must hold the {self.config.rollout.groups_per_step} groups of a step at once; it has "
                f"{self.ring_bytes} bytes and finished groups wait for room (mean record {mean:.0f} bytes): "
                f"set ring.bytes to {need} or more",
            )

    def waits_for(self) -> str:
        """Who waits for whom, in words."""
        if self.updates.phase is not Phase.IDLE:
            return f"a weight update is {self.updates.phase}"
        if self.pulse is None:
            return f"{self._last_wait}; the generator has not reported yet"
        return (
            f"{self._last_wait}; the generator has {self.pulse.num_running} samples running, "
            f"{self.pulse.num_queued} groups queued, {self.pulse.num_waiting_for_ring} waiting for ring space"
        )

    # --- the whole --------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Something degraded that repairs itself: every rank's log gets it."""
        self.log.write("warning", text=text)
        for rank in self.world.members.values():
            self.outbox.to_rank(rank, m.Notice(text=text))

    def give_up(self, error: str, text: str) -> None:
        """The run cannot go on: every rank's present or next call raises."""
        if self.fatal is not None:
            return
        self.fatal = m.Fatal(error=error, text=text)
        self.log.write("fatal", error=error, text=text)
        for rank in self.world.members.values():
            self.outbox.to_rank(rank, self.fatal)
        self.outbox.end(1, text)

    @property
    def is_complete(self) -> bool:
        """Whether the run has nothing left to do: all steps trained and no rank attached."""
        return bool(
            self.flow and self.flow.all_composed and not self.flow.open_steps and not self.world.members
        )

    def counts(self) -> dict[str, int]:
        """The books for people: what was taken, and where all of it is."""
        counts = self.flow.books.counts() if self.flow else None
        if counts is None:
            return dict.fromkeys(("taken", "trained", "filtered", "failed", "dropped", "returned"), 0)
        return {
            "taken": counts.taken,
            "trained": counts.trained,
            "filtered": counts.filtered,
            "failed": counts.failed,
            "dropped": counts.dropped,
            "returned": counts.queued + counts.live + counts.handed,
        }

    def statistics(self) -> dict[str, Any]:
        """A snapshot for `hook.statistics()` and observers."""
        flow = self.flow
        counts: Counts | None = flow.books.counts() if flow else None
        return {
            "counts": {name: getattr(counts, name) for name in Counts.__slots__} if counts else {},
            "step": flow.step if flow else 0,
            "version": flow.version if flow else 0,
            "lineage": self.lineage,
            "update": str(self.updates.phase),
            "waits_for": self.waits_for(),
            "ring": self.ring_figures(),
            "refused_records": flow.meter.num_refused if flow else 0,
            "mean_record_bytes": flow.meter.mean_record_bytes if flow else 0.0,
            "trained_tokens": flow.meter.trained_tokens if flow else 0,
            "dropped_tokens": flow.meter.dropped_tokens if flow else 0.0,
            "generator": self._generator_figures(),
        }

    def ring_figures(self) -> dict[str, float]:
        """Bytes of the ring: its size, the span from tail to head, and what records hold."""
        used = self.table.statistics()
        return {"bytes": self.ring_bytes, "span_bytes": used.span_bytes, "num_records": used.num_live}

    def _generator_figures(self) -> dict[str, float]:
        if self.pulse is None:
            return {}
        pulse = self.pulse
        return {
            "num_queued": pulse.num_queued,
            "num_running": pulse.num_running,
            "num_waiting_for_ring": pulse.num_waiting_for_ring,
            "tokens_per_s": pulse.tokens_per_s,
            "loop_gap_ms": pulse.loop_gap_ms,
            **pulse.figures,
        }
