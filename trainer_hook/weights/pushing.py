"""One push of weights: by files, HTTP or broadcast; once more to those that are left when engines are lost.

| a rank waits | for |
|---|---|
| in the gathering of sharded weights | the other ranks that hold parts of them |
| after a stream | the other ranks to be through with it too, and the leader's word whether to repeat it |

Invariant: all ranks make the same number of passes over the weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook import messages as m
from trainer_hook.errors import HookError, PublishFailed, StreamBroken, WeightUpdateFailed
from trainer_hook.session.session import Session
from trainer_hook.weights.gathering import Gathering
from trainer_hook.weights.publish import publish
from trainer_hook.weights.stream import BroadcastStream, Stream, TensorStream
from trainer_hook.weights.update_group import UpdateGroup
from trainer_hook.weights.weight_files import CHANGED

_MAX_PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What the engines are to make of it at the end of the update."""

    path: Path | None = None
    """Folder to load; None: they have the weights already."""
    changed: Path | None = None
    is_streamed: bool = False


class Pusher:
    """Pushes for one rank; keeps the process group from one update to the next."""

    def __init__(self, session: Session, *, via: m.Via, bucket_bytes: int) -> None:
        """`via` and `bucket_bytes` are the run's, for pushes that do not say."""
        self._session = session
        self._via = via
        self._bucket_bytes = bucket_bytes
        self._group: UpdateGroup | None = None
        self.spans_nodes = False
        """Ranks of other nodes gather too, and would not hear that a pass is repeated."""

    def push(self, source: Any, begun: m.UpdateBegun, *, via: str | None, bucket_bytes: int | None) -> Pushed:
        """See `WeightUpdate.push`."""
        way = self._way(via)
        size = self._bucket_bytes if bucket_bytes is None else bucket_bytes
        folder = Path(begun.path)
        if way is m.Via.DISK:
            publish(source, folder, write=begun.leader, max_file_bytes=size, base=begun.base)
            changed = folder / CHANGED
            return Pushed(path=folder, changed=changed if changed.is_dir() else None)
        weights = Gathering(source, size)
        with self._session.call():
            self._stream(weights, begun, way)
        return Pushed(is_streamed=True)

    def close(self) -> None:
        """Leave the group, without waiting for anybody."""
        group, self._group = self._group, None
        if group is not None:
            group.leave(abort=True)

    def _way(self, via: str | None) -> m.Via:
        try:
            return self._via if via is None else m.Via(via)
        except ValueError:
            known = ", ".join(m.Via)
            raise ValueError(f"via must be one of {known}, found {via!r}") from None

    def _stream(self, weights: Gathering, begun: m.UpdateBegun, via: m.Via) -> None:
        for number in range(1, _MAX_PASSES + 1):
            failure = self._pass(weights, begun, via)
            may_repeat = number < _MAX_PASSES and not self.spans_nodes
            again = isinstance(failure, StreamBroken) and may_repeat
            word = self._agree(again=again, failure=None if failure is None else str(failure))
            if not word["again"]:
                break
        if isinstance(failure, PublishFailed):
            raise failure
        if word["failure"] is not None:
            text = f"the engines did not take the weights: {word['failure']}"
            raise WeightUpdateFailed(text) from failure

    def _pass(self, weights: Gathering, begun: m.UpdateBegun, via: m.Via) -> HookError | None:
        """Send everything once; what went wrong, on the leader."""
        if not begun.leader:
            weights.attend()
            return None
        port = _Engines(self._session)
        stream: Stream
        if via is m.Via.TENSOR:
            stream = TensorStream(port, Path(begun.path))
        else:
            backend = "nccl" if weights.device.type == "cuda" else "gloo"
            stream = BroadcastStream(port, self._group, backend=backend)
        for bucket in weights.buckets(stream.place, wanted=lambda: stream.failure is None):
            stream.send(bucket)
        stream.close()
        if isinstance(stream, BroadcastStream):
            self._group = stream.group
        return stream.failure

    def _agree(self, *, again: bool, failure: str | None) -> dict[str, Any]:
        """What the leader says, heard by every rank when all have made their pass."""
        reply = self._session.ask(
            m.UpdatePassed,
            waits_for="all ranks and engines to be through with the weights",
            timeout_s=self._session.wait_timeout_s,
            again=again,
            failure=failure,
        )
        assert isinstance(reply, m.Reply)
        assert isinstance(reply.value, dict)
        return reply.value


class _Engines:
    """The engines, by way of hub and generator."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def begin(self, stage: m.Stage) -> int:
        connection = self._session.connection
        request = m.UpdateStage(request=connection.next_number(), stage=stage)
        connection.begin(request)
        return request.request

    def has_ended(self, number: int) -> bool:
        return self._session.connection.has_arrived(number)

    def finish(self, number: int) -> Any:
        connection = self._session.connection
        try:
            reply = connection.wait(
                number,
                timeout_s=self._session.wait_timeout_s,
                waits_for=f"{self._session.name} waits for the engines to take a part of the weights",
            )
        finally:
            connection.forget(number)
        assert isinstance(reply, m.Reply)
        return reply.value
