"""A weight update: all ranks enter, the leader writes or sends, the engines load, all ranks leave.

| who | waits for | unblocked by |
|---|---|---|
| each rank, entering | the other ranks | `UpdateBegun`, or a rank that leaves |
| the leader, pushing by hand | the engines to stand still | `EnginesPaused`, passed on as `Reply` |
| the leader, sending | the engines to take a stage | `StageDone`, passed on as `Reply`; a new generator |
| each rank, through with its weights | the other ranks | `Reply` with the leader's word |
| each rank, leaving | the engines to confirm | `WeightsPublished`, passed on as `UpdateDone` |

Invariant: an update ends in exactly one of published, failed, cancelled, and the engines run afterwards.
A generator that dies in the middle gets the open request again in its next life; a stage of a stream is not
repeated but refused, so that the leader begins the stream anew.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from fa_rollout.account import events
from fa_rollout.account.events import Note
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.state.weight_folders import WeightFolders
from fa_rollout.hub.state.world import Attachment, World
from trainer_hook.messages import (
    ContinueEngines,
    EngineStage,
    Message,
    PassEnded,
    PauseEngines,
    PublishWeights,
    Refused,
    Reply,
    StageDone,
    StageFailed,
    StageTaken,
    UpdateBegun,
    UpdateCancel,
    UpdateDone,
    UpdateEnter,
    UpdatePassed,
    UpdatePause,
    UpdatePublish,
    UpdateStage,
    WeightsPublished,
)

_NOT_OPEN = ("HookStateError", "no update is open")


class Phase(StrEnum):
    IDLE = "idle"
    ENTERING = "entering"
    OPEN = "open"
    PUBLISHING = "publishing"


class Updates:
    """The update that is going on, if one is."""

    def __init__(
        self,
        *,
        note: Note = lambda event: None,
        world: World,
        directory: Path,
        lease_s: float,
        model: str | None = None,
        to_rank: Callable[[Attachment, Message], None],
        to_generator: Callable[[Message], None],
    ) -> None:
        self._note = note
        self._world = world
        self._lease_s = lease_s
        self._to_rank = to_rank
        self._to_generator = to_generator
        self.phase = Phase.IDLE
        self.model = model
        """Folder of the engines' model, where it is known."""
        self.folders = WeightFolders(directory)
        self._version = 0
        self._was_sent = False
        """The generator was told to publish `_version`: a number that must not be used for other weights."""
        self._lineage = ""
        self._publish = UpdatePublish(request=0, leader=True)
        """What the leader wants to be published."""
        self._failure = _NOT_OPEN
        """Why no update is open: error and text for ranks that think one is."""
        self.in_stream = False
        """The update that is open has sent stages."""
        self._stage: UpdateStage | None = None
        """The leader's request that the engines carry out."""
        self._pause: UpdatePause | None = None
        """The leader's request to pause, kept until the update ends: a new generator pauses again."""
        self._pause_answered = False

    # --- what ranks ask ---------------------------------------------------------------------------

    def enter(self, rank: Attachment, message: UpdateEnter, flow: Flow) -> None:
        """A rank enters; with the last one the update begins."""
        if self.phase not in (Phase.IDLE, Phase.ENTERING):
            self._refuse(
                rank, message.request, "HookStateError", "an update is going on: leave it before the next"
            )
            return
        if self.phase is Phase.IDLE:
            self._note(events.UpdateMoved(phase="entering"))
        self.phase = Phase.ENTERING
        rank.entered_update = message
        members = list(self._world.members.values())
        if self._world.is_complete and all(member.entered_update is not None for member in members):
            self._begin(members, flow)

    def pause(self, rank: Attachment, message: UpdatePause) -> None:
        """The leader wants the engines to stand still while it pushes by hand."""
        if self._is_refused(rank, message.request, leader_only=True):
            return
        self._pause, self._pause_answered = message, False
        self._to_generator(PauseEngines(lease_s=self._lease_s))

    @property
    def has_stage(self) -> bool:
        """Whether the engines are taking a stage."""
        return self._stage is not None

    def stage(self, rank: Attachment, message: UpdateStage) -> None:
        """The leader wants the engines to take the next step of a stream."""
        if self._is_refused(rank, message.request, leader_only=True):
            return
        self._was_sent = self.in_stream = True
        self._stage = message
        self._to_generator(
            EngineStage(
                number=message.request,
                stage=message.stage,
                version=self._version,
                lineage=self._lineage,
                lease_s=self._lease_s,
            )
        )

    def passed(self, rank: Attachment, message: UpdatePassed) -> None:
        """A rank has gone through all its weights; with the last one all hear whether to do so again."""
        if self._is_refused(rank, message.request):
            return
        rank.entered_update = message
        entered = [(member, member.entered_update) for member in self._world.members.values()]
        requests = [(member, said) for member, said in entered if isinstance(said, UpdatePassed)]
        if len(requests) < len(entered):
            return
        failure = next((said.failure for _, said in requests if said.failure is not None), None)
        again = any(said.again for _, said in requests)
        for member, said in requests:
            member.entered_update = None
            self._to_rank(member, PassEnded(request=said.request, again=again, failure=failure))

    def publish(self, rank: Attachment, message: UpdatePublish) -> None:
        """A rank leaves; with the last one the engines load."""
        if self._is_refused(rank, message.request):
            return
        rank.entered_update = message
        if message.leader:
            self._publish = message
        if message.version is not None:
            self._version = message.version
        members = self._world.members.values()
        if all(isinstance(member.entered_update, UpdatePublish) for member in members):
            self.phase = Phase.PUBLISHING
            self._note(events.UpdateMoved(phase="publishing", version=self._version))
            self._was_sent = True
            self._to_generator(self._publication())

    def publish_unasked(self, path: str | None, *, version: int, lineage: str) -> None:
        """Have the engines load weights that no rank waits for in an update."""
        self.phase = Phase.PUBLISHING
        self._publish = UpdatePublish(request=0, leader=True, path=path)
        self._version, self._lineage, self._was_sent = version, lineage, True
        self._to_generator(self._publication())

    def cancel(self, rank: Attachment, message: UpdateCancel) -> None:
        """The body raised on one rank: nothing is published."""
        self._to_rank(rank, Reply(request=message.request))
        if self.phase is Phase.ENTERING and rank.entered_update is None:
            return  # of the update before, which another rank has ended the same way already
        rank.entered_update = None
        self._fail("WeightUpdateFailed", f"{rank.name} cancelled the update: {message.text}")

    def left(self, rank: Attachment) -> None:
        """A rank is gone."""
        if self.phase is not Phase.IDLE:
            self._fail("PeerLost", f"{rank.name} is gone in the middle of a weight update")

    # --- what the generator answers ---------------------------------------------------------------

    def paused(self) -> None:
        """The engines stand still."""
        leader = self._world.leader
        if self._pause is not None and not self._pause_answered and leader is not None:
            self._pause_answered = True
            self._note(events.UpdateMoved(phase="paused", version=self._version))
            self._to_rank(leader, Reply(request=self._pause.request))

    def staged(self, message: StageDone | StageFailed) -> None:
        """The engines have taken the stage, or could not."""
        if self._stage is None or self._stage.request != message.number:
            return
        if isinstance(message, StageDone):
            self._answer_stage(StageTaken(request=message.number, audience=message.audience))
        else:
            error = "StreamBroken" if message.may_retry else "WeightUpdateFailed"
            self._answer_stage(Refused(request=message.number, error=error, text=message.text))

    def published(self, message: WeightsPublished, flow: Flow) -> bool:
        """Every engine has the new version; False when no update waits for it."""
        if self.phase is not Phase.PUBLISHING or message.version != self._version:
            return False
        flow.published(message.version)
        said = self._publish
        self.folders.published(said.path, is_streamed=said.is_streamed)
        self._end(
            lambda request: UpdateDone(request=request, version=message.version, bubble_s=message.bubble_s)
        )
        return True

    def failed(self, text: str) -> None:
        """The engines could not pause or load; they go on with the old version."""
        if self.phase is not Phase.IDLE:
            self._fail("WeightUpdateFailed", text, engines_run=True)

    @property
    def is_unasked(self) -> bool:
        """Engines load weights that no rank waits for in an update."""
        return self.phase is Phase.PUBLISHING and self._publish.request == 0

    def generator_is_back(self) -> None:
        """Give a new generator what its predecessor left open."""
        if self.phase is Phase.PUBLISHING:
            self._to_generator(self._publication())
        elif self._stage is not None:
            text = "the generator died, and its next life knows nothing of this stream"
            self._answer_stage(Refused(request=self._stage.request, error="StreamBroken", text=text))
        elif self._pause is not None:
            self._to_generator(PauseEngines(lease_s=self._lease_s))

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, members: list[Attachment], flow: Flow) -> None:
        self.phase = Phase.OPEN
        # A checkpoint taken between a step and its update has newer weights than its version.
        is_same = flow.weights_pending and not flow.handed_since_publication
        version = flow.version if is_same else self._next_number(flow)
        self._version, self._was_sent = version, False
        self._note(events.UpdateMoved(phase="open", version=version))
        self._lineage = flow.lineage
        self._publish = UpdatePublish(request=0, leader=True)
        folder = self.folders.open(self._lineage, self._version)
        for member in members:
            assert member.entered_update is not None
            request = member.entered_update.request
            member.entered_update = None
            self._to_rank(
                member,
                UpdateBegun(
                    request=request,
                    version=self._version,
                    path=str(folder),
                    leader=member is self._world.leader,
                    model=self.model,
                    rest=self.folders.published_path or (self.model if flow.version == 0 else None),
                    must_be_whole=flow.weights_pending,
                ),
            )

    def _next_number(self, flow: Flow) -> int:
        """One more than was published, or than an update that failed may have left in some engines."""
        tried = self._version if self._was_sent and self._lineage == flow.lineage else 0
        return max(flow.version, tried) + 1

    def _publication(self) -> PublishWeights:
        said = self._publish
        return PublishWeights(
            version=self._version,
            lineage=self._lineage,
            path=said.path,
            is_streamed=said.is_streamed,
            probes=said.probes,
            scored=said.scored,
        )

    def _fail(self, error: str, text: str, *, engines_run: bool = False) -> None:
        if self.phase in (Phase.OPEN, Phase.PUBLISHING) and not engines_run:
            self._to_generator(ContinueEngines())
        self._note(events.UpdateMoved(phase="failed", text=text))
        self._failure = (error, text)
        self._end(lambda request: Refused(request=request, error=error, text=text))

    def _end(self, answer: Callable[[int], Message]) -> None:
        self.phase = Phase.IDLE
        self.in_stream = False
        leader = self._world.leader
        if self._stage is not None:
            self._answer_stage(answer(self._stage.request))
        if self._pause is not None and not self._pause_answered and leader is not None:
            self._to_rank(leader, answer(self._pause.request))
        self._pause = None
        for member in self._world.members.values():
            if member.entered_update is not None:
                self._to_rank(member, answer(member.entered_update.request))
            member.entered_update = None

    def _answer_stage(self, answer: Message) -> None:
        self._stage = None
        if self._world.leader is not None:
            self._to_rank(self._world.leader, answer)

    def _is_refused(self, rank: Attachment, request: int, *, leader_only: bool = False) -> bool:
        """Answer a request that cannot be served now."""
        if self.phase is not Phase.OPEN:
            self._refuse(rank, request, *self._failure)
        elif leader_only and rank is not self._world.leader:
            text = "only the leader of an open update may pause engines and send to them"
            self._refuse(rank, request, "HookStateError", text)
        else:
            return False
        return True

    def _refuse(self, rank: Attachment, request: int, error: str, text: str) -> None:
        self._to_rank(rank, Refused(request=request, error=error, text=text))
