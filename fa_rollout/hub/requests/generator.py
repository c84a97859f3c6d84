"""Handles the generator's messages: groups, engines, and the generator itself.

In: messages of the generator. Out: changes of the books.
"""

import time
from collections.abc import Callable

import msgspec

from fa_rollout.account import events
from fa_rollout.hub.checkpoints.saving import States
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.flow.meter import TooManyFailures
from fa_rollout.hub.flow.stream import Source
from fa_rollout.hub.requests.fed import FedStream, LauncherHandler
from fa_rollout.hub.requests.shards import Shards
from shm.errors import DescriptorRefused
from trainer_hook import messages as m
from trainer_hook.messages import Settlement

EXIT_REFUSED = 2
"""Nothing was generated; the text says what the user must change."""


class GeneratorHandler:
    """Handles the messages of the generator."""

    def __init__(
        self,
        core: Core,
        *,
        on_ready: Callable[[Flow], None],
        states: States,
        shards: Shards,
        fed: FedStream | None = None,
        launcher: LauncherHandler | None = None,
    ) -> None:
        self._core = core
        self._on_ready = on_ready
        self._states = states
        self._shards = shards
        self._fed = fed
        self._launcher = launcher
        self._num_prompts = 0
        self._told_tail = 0
        """Ring tail that the generator knows."""

    def receive(self, message: m.Message) -> None:
        """Handle a message of the generator."""
        match message:
            case m.GeneratorReady():
                self._generator_ready(message)
            case m.Pulse():
                self._core.pulses.add(message, time.monotonic())
            case m.Warned():
                self._core.warn(message.text)
            case m.GaveUp():
                if self._core.flow is None:
                    self._core.give_up("GeneratorFailed", message.text, EXIT_REFUSED)
                else:
                    self._core.give_up("GeneratorFailed", f"the generator failed for good: {message.text}")
            case m.EnginesChanged():
                self._core.pulses.engines_changed(message)
                self._core.membership.changed(message)
            case m.EnginesPaused():
                self._core.updates.paused()
            case m.StageDone() | m.StageFailed():
                self._core.updates.staged(message)
            case m.UpdateFailed():
                if self._core.updates.is_unasked and self._core.flow is not None:
                    self._core.flow.lacking += f" (loading the first weights failed: {message.text})"
                self._core.updates.failed(message.text)
            case m.Evaluated():
                self._core.evaluations.evaluated(message)
            case m.EvaluationEnded():
                self._core.evaluations.ended(message)
            case m.Ping() | m.Pong():
                pass
            case _:
                assert self._core.flow is not None, "the generator reports groups before it is ready"
                self._group_news(message, self._core.flow)

    def _group_news(self, message: m.Message, flow: Flow) -> None:
        match message:
            case m.Commit():
                self._commit(message, flow)
            case m.Dispatched():
                flow.books.dispatched(message.groups, message.version)
                self._core.log.write(events.GroupsDispatched(groups=message.groups, version=message.version))
            case m.Settled():
                self._settle(message, flow)
            case m.PartialsSaved():
                self._states.saved(message, flow)
            case m.WeightsPublished():
                core = self._core
                write_s, load_s = core.clock.write_s, core.clock.update_s(time.monotonic())
                if core.updates.published(message, flow):
                    figures = core.history.published(
                        message.version, write_s=write_s, load_s=load_s, bubble_s=message.bubble_s
                    )
                    core.log.write(events.VersionPublished(version=message.version, figures=figures))

    def _commit(self, message: m.Commit, flow: Flow) -> None:
        bare = msgspec.structs.replace(message, payload=b"") if message.payload else message
        kind: type[events.GroupRecorded] = events.RecordUnwanted
        try:
            if flow.commit(bare):
                kind = events.GroupCommitted
        except DescriptorRefused as error:
            kind = events.RecordRefused
            self._core.warn(f"a record of group {message.group} was refused; the group restarts: {error}")
        if kind is events.GroupCommitted and self._launcher is not None:
            self._launcher.committed(message)
        self._core.log.write(
            kind(
                group=message.group,
                attempt=message.attempt,
                sequence=message.sequence,
                bytes=message.length,
                versions=(message.oldest_version, message.newest_version),
                prompt_lens=message.prompt_lens,
                response_lens=message.response_lens,
                rewards=message.rewards,
            )
        )

    def _settle(self, message: m.Settled, flow: Flow) -> None:
        if self._launcher is not None:
            self._launcher.settled(message)
        kind = events.SETTLED[message.outcome]
        try:
            kind = kind if flow.settle(message) else events.SettlementUnwanted
        except TooManyFailures as error:
            self._core.give_up("GeneratorFailed", str(error))
        is_first = self._note(kind(group=message.group, attempt=message.attempt, reason=message.reason))
        if is_first and message.outcome is Settlement.FAILED:
            why = message.reason.partition("\n")[0]
            self._core.warn(f"group {message.group} failed: {why} (the first failure of this kind)")

    def gone(self, how: str, *, will_restart: bool) -> None:
        """The generator has exited; all its messages were handled before."""
        lost = self._core.flow.generator_died() if self._core.flow else []
        self._core.log.write(events.GeneratorDied(how=how, requeued=[group.group for group in lost]))
        self._core.pulses.end_life(time.monotonic())
        self._core.evaluations.generator_is_gone()
        self._core.membership.generator_is_gone()
        self._states.generator_is_gone()
        if will_restart:
            self._core.warn(f"the generator ended {how}; {len(lost)} groups start again with the next one")
        else:
            self._core.give_up("GeneratorFailed", f"the generator ended {how} and was restarted too often")

    def tell_tail(self) -> None:
        """Say how much of the ring is free again."""
        tail = self._core.table.tail
        if tail != self._told_tail:
            self._told_tail = tail
            self._core.outbox.to_generator(m.Tail(position=tail))

    def resume_message(self) -> m.Resume:
        """First message to a new generator, after the last one exited and its messages were handled."""
        head, sequence = self._core.table.restart()
        self._told_tail = self._core.table.tail
        return m.Resume(
            incarnation=self._core.table.incarnation,
            head=head,
            tail=self._core.table.tail,
            sequence=sequence,
            version=self._core.flow.version if self._core.flow else 0,
            lineage=self._core.lineage,
            weights=self._core.updates.folders.published_path,
            engines=self._core.membership.urls,
            known_engines=self._core.membership.known,
            is_streamed=self._core.updates.folders.is_streamed,
            in_stream=self._core.updates.in_stream,
            weights_pending=self._core.flow is None or self._core.flow.weights_pending,
            is_new=self._core.flow is None,
            lineages=self._core.former_lineages,
            step=self._core.announced.step if self._core.announced else 0,
        )

    def _generator_ready(self, message: m.GeneratorReady) -> None:
        self._core.log.write(
            events.GeneratorOpened(
                incarnation=message.incarnation,
                engines=message.engines,
                concurrency=message.concurrency,
            )
        )
        if self._core.flow is None:
            self._core.flow = self._new_flow(message.num_prompts)
            self._core.first_weights = message.first_weights
            self._core.updates.model = self._core.updates.model or message.first_weights
            if message.strangers:
                self._lack(self._core.flow, message.strangers)
            if self._launcher is not None:
                self._launcher.flow_begins(self._core.flow)
            self._core.outbox.to_launcher(m.RunOpened())
        elif self._num_prompts != message.num_prompts:
            found = f"it had {self._num_prompts} rows, now {message.num_prompts}"
            self._core.give_up("GeneratorFailed", f"the data must not change during a run: {found}")
        self._core.pulses.begin_life(message.concurrency)
        self._core.evaluations.generator_is_up()
        self._core.membership.generator_is_up(message.known_engines)
        self._on_ready(self._core.flow)
        self._core.updates.generator_is_back()

    def _lack(self, flow: Flow, strangers: list[str]) -> None:
        """Start no group before the engines have weights of this run."""
        core, found = self._core, "; ".join(strangers)
        flow.weights_pending = True
        flow.lacking = (
            f"the engines hold weights of another run ({found}): call hook.update_weights() before the first "
            "batch, set engine.model to the folder of the model that they started with, or restart them"
        )
        files = core.first_weights
        core.log.write(events.StrangersFound(engines=strangers, first_weights=core.first_weights))
        core.warn(
            f"the engines hold weights of another run ({found}): they get "
            + ("those of hook.update_weights()" if files is None else f"those in {files}")
            + " before the first group starts"
        )

    def _new_flow(self, num_prompts: int) -> Flow:
        self._num_prompts = num_prompts
        if self._fed is not None:
            return self._flow(self._fed)
        return self._flow(self._shards.stream(num_prompts))

    def _note(self, event: events.Event) -> bool:
        """Log an event; True for a group lost for a new reason."""
        self._core.log.write(event)
        return isinstance(event, events.GroupLost) and self._core.history.lost(event.outcome, event.reason)

    def _flow(self, source: Source) -> Flow:
        core = self._core
        flow = Flow(
            core.config,
            source,
            core.table,
            lineage=core.lineage,
            note=self._note,
            recording=core.recording,
        )
        # With another node as leader, the engines' weights are not known yet.
        flow.weights_pending = core.config.engine.shared and core.config.data.shard > 0
        return flow
