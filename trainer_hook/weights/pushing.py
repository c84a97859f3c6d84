"""One push of weights: by files, HTTP or broadcast; repeated for the remaining engines if some are lost.

| a rank waits | for |
|---|---|
| in the gathering of sharded weights | the other ranks that hold parts of them |
| after a stream | the other ranks to finish it, and the leader's decision whether to repeat it |

Invariant: all ranks make the same number of passes over the weights.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook import messages as m
from trainer_hook.errors import (
    HookError,
    PublishFailed,
    StreamBroken,
    WeightsMismatch,
    WeightUpdateFailed,
)
from trainer_hook.model.fit import check_kinds, fitting
from trainer_hook.model.index import ModelIndex, NoIndex
from trainer_hook.model.pieces import Piece
from trainer_hook.model.probes import Probes
from trainer_hook.model.score import score
from trainer_hook.session.nodes import Nodes
from trainer_hook.session.session import Session
from trainer_hook.weights.gathering import Gathering
from trainer_hook.weights.publish import publish
from trainer_hook.weights.stream import BroadcastStream, StageStream, TensorStream
from trainer_hook.weights.update_group import UpdateGroup

log = logging.getLogger("trainer_hook")

_MAX_PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Result of a push, for the end of the update."""

    path: Path | None = None
    """Folder to load; None: the engines already have the weights."""
    is_streamed: bool = False
    probes: Sequence[m.Probe] = ()
    scored: m.Scored | None = None


class Pusher:
    """Pushes for one rank; keeps the process group from one update to the next."""

    def __init__(self, session: Session, *, via: m.Via, bucket_bytes: int) -> None:
        """`via` and `bucket_bytes` are the run's defaults."""
        self._session = session
        self._via = via
        self._bucket_bytes = bucket_bytes
        self._group: UpdateGroup | None = None
        self.nodes: Nodes | None = None
        """Set with several nodes: their ranks gather too, but cannot learn that a pass is repeated."""
        self._num_pushes = 0
        self._indices: dict[str | None, ModelIndex | None] = {}
        """By folder."""

    def push(
        self, source: Any, begun: m.UpdateBegun, *, via: str | None, bucket_bytes: int | None, partial: bool
    ) -> Pushed:
        """See `WeightUpdate.push`."""
        way = self._way(via)
        size = self._bucket_bytes if bucket_bytes is None else bucket_bytes
        folder = Path(begun.path)
        pieces = self._fitting(source, begun, needs_rest=partial and way is m.Via.DISK, partial=partial)
        scored = None if partial or not begun.leader else self._score(source)
        if way is m.Via.DISK:
            rest = begun.rest if partial else None
            probes = Probes(self._index(begun))
            publish(
                pieces,
                folder,
                write=begun.leader,
                max_file_bytes=size,
                rest=rest,
                look=probes.look,
            )
            return Pushed(path=folder, probes=probes.chosen, scored=scored)
        with self._session.call():
            self._stream(Gathering(pieces, size), begun, way, partial=partial)
        return Pushed(is_streamed=True, scored=scored)

    def _score(self, source: Any) -> m.Scored | None:
        """At the 1st, 2nd, 4th, 8th ... push: the longer engines miss weights, the larger the difference."""
        self._num_pushes += 1
        is_due = self._num_pushes & (self._num_pushes - 1) == 0
        return score(source) if is_due else None

    def check_folder(self, folder: Path, begun: m.UpdateBegun) -> None:
        """Check that a folder written by the leader contains the weights of the engines' model.

        Raises:
            WeightsMismatch: it does not.
        """
        index = self._index(begun)
        if index is not None and begun.leader:
            try:
                written = ModelIndex.read(folder)
            except NoIndex as error:
                log.warning("event=weights_unchecked reason=%s", error)
            else:
                check_kinds(written.kinds, index)

    def close(self) -> None:
        """Leave the group without waiting."""
        group, self._group = self._group, None
        if group is not None:
            group.leave(abort=True)

    def _fitting(
        self, source: Any, begun: m.UpdateBegun, *, partial: bool, needs_rest: bool
    ) -> Sequence[Piece]:
        """The pieces of `source`, after every rank has checked that they fit; gathering needs all ranks."""
        pieces: Sequence[Piece] = []
        failure: TypeError | WeightsMismatch | None = None
        try:
            if partial:
                _check_partial(begun, needs_rest=needs_rest)
            pieces = fitting(source, self._index(begun), partial=partial)
        except (TypeError, WeightsMismatch) as error:
            failure = error
        others = self._shared_failure(failure)
        if failure is not None or others is not None:
            raise failure or WeightsMismatch(others)
        return pieces

    def _shared_failure(self, failure: Exception | None) -> str | None:
        """The failure of another rank, if any."""
        if self.nodes is not None:
            has_failed = self.nodes.exchange(failure is not None)
            return "weights must fit on every rank; see the error of another one" if any(has_failed) else None
        if self._session.is_alone:
            return None
        with self._session.call():
            word = self._agree(again=False, failure=None if failure is None else str(failure))
        return word.failure

    def _index(self, begun: m.UpdateBegun) -> ModelIndex | None:
        """The engines' model, from its folder; None if this process cannot read it."""
        if begun.model not in self._indices:
            try:
                if begun.model is None:
                    raise NoIndex("engine.model is not set, and the engines do not name a folder")
                self._indices[begun.model] = ModelIndex.read(Path(begun.model))
            except NoIndex as error:
                self._indices[begun.model] = None
                if begun.leader:
                    log.warning(
                        "event=weights_unchecked reason=%s: names and shapes of weights are not compared "
                        "with the engines' model; set engine.model to a folder that this process can read",
                        error,
                    )
        return self._indices[begun.model]

    def _way(self, via: str | None) -> m.Via:
        try:
            return self._via if via is None else m.Via(via)
        except ValueError:
            known = ", ".join(m.Via)
            raise ValueError(f"via must be one of {known}, found {via!r}") from None

    def _stream(self, weights: Gathering, begun: m.UpdateBegun, via: m.Via, *, partial: bool) -> None:
        for number in range(1, _MAX_PASSES + 1):
            failure = self._pass(weights, begun, m.OpenStream(via=via, partial=partial))
            # After a partial push breaks off, an engine needs all weights
            may_repeat = number < _MAX_PASSES and self.nodes is None and not partial
            again = isinstance(failure, StreamBroken) and may_repeat
            word = self._agree(again=again, failure=None if failure is None else str(failure))
            if not word.again:
                break
        if isinstance(failure, PublishFailed):
            raise failure
        if word.failure is not None:
            text = f"the engines did not take the weights: {word.failure}"
            raise WeightUpdateFailed(text) from failure

    def _pass(self, weights: Gathering, begun: m.UpdateBegun, opening: m.OpenStream) -> HookError | None:
        """Send everything once; returns the failure, on the leader."""
        if not begun.leader:
            weights.attend()
            return None
        port, probes = _Engines(self._session), Probes(self._index(begun))
        stream: StageStream
        if opening.via is m.Via.TENSOR:
            stream = TensorStream(port, opening, probes, Path(begun.path))
        else:
            backend = "nccl" if weights.device.type == "cuda" else "gloo"
            stream = BroadcastStream(port, opening, probes, self._group, backend=backend)
        for bucket in weights.buckets(stream.place, wanted=lambda: stream.failure is None):
            stream.send(bucket)
        stream.close()
        if isinstance(stream, BroadcastStream):
            self._group = stream.group
        return stream.failure

    def _agree(self, *, again: bool, failure: str | None) -> m.PassEnded:
        """The leader's decision, received by every rank after all have finished their pass."""
        return self._session.ask(
            lambda number: m.UpdatePassed(request=number, again=again, failure=failure),
            m.PassEnded,
            waits_for="all ranks and engines to be through with the weights",
            timeout_s=self._session.wait_timeout_s,
        )


def _check_partial(begun: m.UpdateBegun, *, needs_rest: bool) -> None:
    if begun.must_be_whole:
        raise WeightsMismatch(
            "the engines lack the weights that this run goes on from (a checkpoint's): push all of them first"
        )
    if needs_rest and begun.rest is None:
        raise WeightsMismatch(
            "a partial push by files is completed by the weights of the version before, and no file holds "
            'these: push all of them, or use via="tensor" or "distributed"'
        )


class _Engines:
    """The engines, through hub and generator."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def begin(self, stage: m.Stage) -> int:
        connection = self._session.connection
        request = m.UpdateStage(request=connection.next_number(), stage=stage)
        connection.begin(request)
        return request.request

    def has_ended(self, number: int) -> bool:
        return self._session.connection.has_arrived(number)

    def finish(self, number: int) -> m.Audience | None:
        connection = self._session.connection
        try:
            reply = connection.wait(
                number,
                timeout_s=self._session.wait_timeout_s,
                waits_for=f"{self._session.name} waits for the engines to take a part of the weights",
            )
        finally:
            connection.forget(number)
        assert isinstance(reply, m.StageTaken)
        return reply.audience
