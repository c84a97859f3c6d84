"""The hub's mind: messages in, messages out, no sockets.

| who | waits for | unblocked by |
|---|---|---|
| a rank in `next_batch` | all ranks, a closed batch, the end of an update | `Batch`, `Ended`, `Refused` |
| a rank in `update_weights` | see `updates.py` | |
| the generator | credits, ring space | `Start`, `Tail` |
| the hub | nobody | |

Invariant: after each event `advance` leaves nothing to do: all credits are issued, every batch that can close
is closed, every free byte of the ring is announced.
"""

import os
import secrets
import time
from pathlib import Path

from fa_rollout.account import events
from fa_rollout.account.figures import StepFigures
from fa_rollout.config import Config, to_shown_dict
from fa_rollout.hub.checkpoints.resuming import Restarts
from fa_rollout.hub.checkpoints.saving import States
from fa_rollout.hub.core import Core, HubOutbox
from fa_rollout.hub.flow import replay
from fa_rollout.hub.flow.flow import Flow, Step
from fa_rollout.hub.io.event_log import EventLog
from fa_rollout.hub.requests.deadlines import Watch
from fa_rollout.hub.requests.fed import FedStream, LauncherHandler
from fa_rollout.hub.requests.generator import GeneratorHandler
from fa_rollout.hub.requests.ranks import RankHandler
from fa_rollout.hub.requests.shards import Shards
from fa_rollout.hub.state.evaluations import Evaluations
from fa_rollout.hub.state.membership import EngineMembership
from fa_rollout.hub.state.steps import Steps
from fa_rollout.hub.state.updates import Phase, Updates
from fa_rollout.hub.state.world import World
from shm import RingTable
from trainer_hook.messages import Drop, Start


class Hub:
    """The handlers, and the effects of their events."""

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        directory: Path,
        table: RingTable,
        outbox: HubOutbox,
        log: EventLog,
        fed: FedStream | None = None,
    ) -> None:
        """`fed`: where the launcher's prompts come in; None: the generator reads the data."""
        world = World(config.trainer.num_ranks)
        weights_dir = (directory / "weights").resolve()
        self.core = Core(
            config=config,
            run=run,
            outbox=outbox,
            log=log,
            table=table,
            world=world,
            updates=Updates(
                note=log.write,
                world=world,
                directory=weights_dir,
                lease_s=config.trainer.pause_lease_s,
                model=config.engine.model and os.path.abspath(config.engine.model),
                to_rank=outbox.to_rank,
                to_generator=outbox.to_generator,
            ),
            evaluations=Evaluations(note=log.write, to_rank=outbox.to_rank, to_generator=outbox.to_generator),
            membership=EngineMembership(
                note=log.write,
                warn=lambda text: self.core.warn(text),
                to_generator=outbox.to_generator,
            ),
            steps=Steps(config, world, outbox.to_rank, log.write, on_trained=self._trained),
            weights_dir=weights_dir,
            spool_dir=_made(directory / "spool"),
            lineage=secrets.token_hex(4),
            recording=None if config.run.replay is None else replay.read(config.run.replay),
        )
        log.write(
            events.HubBegan(
                run=run,
                lineage=self.core.lineage,
                time_s=time.time(),
                folder=str(Path.cwd()),
                config=to_shown_dict(config),
            )
        )
        self._states = States(self.core)
        self._restarts = Restarts(self.core)
        shards = Shards(self.core, is_fed=fed is not None)
        self.ranks = RankHandler(self.core, states=self._states, restarts=self._restarts, shards=shards)
        self._fed = fed
        self.launcher = None if fed is None else LauncherHandler(self.core, fed)
        self.generator = GeneratorHandler(
            self.core,
            on_ready=self.ranks.generator_is_ready,
            states=self._states,
            shards=shards,
            fed=fed,
            launcher=self.launcher,
        )
        self.watch = Watch(self.core)

    def advance(self) -> None:
        """Do all that the last events made possible."""
        self._follow_up()
        core = self.core
        is_away = not core.pulses.is_up
        core.clock.look(core.world, core.steps, core.updates.phase, time.monotonic(), is_away=is_away)

    def _follow_up(self) -> None:
        core = self.core
        if core.stop_reason is not None:
            core.steps.end(core.stop_reason, from_step=core.flow.step if core.flow else 0)
        if core.flow is None or core.fatal is not None:
            return
        self._issue(core.flow)
        self._serve_slow(core.flow)
        if core.updates.phase is Phase.IDLE:
            self._serve(core.flow)
            self._stop_hopeless(core.flow)
            self._issue(core.flow)
        else:
            self._refuse_crossed()
        if self.launcher is not None:
            self.launcher.report(core.flow)
        self.generator.tell_tail()

    def stop(self, reason: str) -> None:
        """Begin no step and start no group any more; ranks end their step, and then hear why."""
        self.core.stop_reason = reason
        self.core.evaluations.stop(reason)

    def _issue(self, flow: Flow) -> None:
        """Start what the window allows; a hand-over opens it further."""
        if not self.core.pulses.is_up or self.core.stop_reason is not None:
            return
        assignments = flow.issue()
        if assignments:
            payloads = [] if self._fed is None else [self._fed.payload(a.group) for a in assignments]
            kept, path = flow.head_starts(assignments), flow.kept.path
            self.core.log.write(
                events.GroupsIssued(
                    groups=[a.group for a in assignments],
                    attempts=[a.attempt for a in assignments],
                    kept=[entry.group for entry in kept],
                )
            )
            self.core.outbox.to_generator(
                Start(groups=assignments, payloads=payloads, kept=kept, kept_path=path)
            )

    def _trained(self, step: Step) -> StepFigures:
        clock, now_s = self.core.clock, time.monotonic()
        is_first = clock.is_first_lap
        busy = self.core.pulses.busy
        return self.core.history.trained(step, clock.end_lap(now_s), is_first=is_first, busy=busy)

    def _stop_hopeless(self, flow: Flow) -> None:
        """Engines need not finish what no step can train any more."""
        hopeless = flow.take_hopeless()
        if hopeless:
            reason = f"no step from version {flow.version} on can train it within rollout.staleness"
            self.core.outbox.to_generator(Drop(groups=hopeless, reason=reason))

    def _serve(self, flow: Flow) -> None:
        """Give waiting ranks their part, composing the step when none asked for it before."""
        core, world = self.core, self.core.world
        self._restarts.bring_first_weights(flow)
        if core.updates.phase is not Phase.IDLE:
            return
        if flow.all_composed:
            core.steps.end(core.steps.end_reason(flow), from_step=flow.step)
        if world.closed:
            names = ", ".join(world.closed)
            core.refuse_waiting("PeerLost", f"a batch needs all ranks, and these closed their hooks: {names}")
        if not world.is_complete:
            core.batch_waits_for = f"{world.num_missing} ranks of the trainer to attach"
            return
        for rank in world.waiting():
            if rank.waiting is None:
                return  # all were refused at once
            wait = core.steps.serve(rank, flow, core.table)
            if wait is not None:
                core.batch_waits_for = wait.reason
                starved = flow.starved()
                if starved is not None:
                    core.refuse_waiting("Stalled", starved)
                return

    def _serve_slow(self, flow: Flow) -> None:
        """Give ranks their part of steps that others have got: these may wait for them in an update."""
        for rank in self.core.world.waiting():
            if rank.waiting is not None and self.core.steps.has(rank.waiting.step):
                self.core.steps.serve(rank, flow, self.core.table)

    def _refuse_crossed(self) -> None:
        """Ranks in different calls would wait for one another for ever."""
        members, waiting = self.core.world.members.values(), self.core.world.waiting()
        entered = [member.name for member in members if member.entered_update is not None]
        if (
            self.core.updates.phase is Phase.ENTERING
            and waiting
            and len(entered) + len(waiting) == len(members)
        ):
            names = ", ".join(entered)
            text = f"all ranks must call update_weights together: {names} did, the others ask for a batch"
            self.core.refuse_waiting("HookStateError", text)

    @property
    def is_complete(self) -> bool:
        """Whether the run has nothing left to do: all steps trained and no rank attached."""
        flow = self.core.flow
        return flow is not None and flow.all_composed and not flow.open_steps and not self.core.world.members


def _made(folder: Path) -> Path:
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
