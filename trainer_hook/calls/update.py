"""Weight updates, on one rank.

| a rank waits | until |
|---|---|
| on entering the block | all ranks have entered |
| in `pause` (the leader) | the engines are paused |
| on leaving the block | all ranks have left and every engine has confirmed the version |

Invariant: a block that raises publishes nothing. The engines pause from `pause`, or from a push without
files, to the end of the block; otherwise only while they load.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook import messages as m
from trainer_hook.errors import HookStateError, WeightUpdateFailed
from trainer_hook.session.session import Session
from trainer_hook.session.sharing import EngineSharing
from trainer_hook.session.stopwatch import Stopwatch
from trainer_hook.weights.pushing import Pushed, Pusher


class WeightUpdate:
    """The next weight version, and methods to send its weights to the engines."""

    def __init__(self, begun: m.UpdateBegun, *, pusher: Pusher, pause_engines: Callable[[], None]) -> None:
        self._begun = begun
        self._pusher = pusher
        self._pause_engines = pause_engines
        self._is_open = True
        self._pushed = Pushed()
        self._is_partial = False
        self.version: int = begun.version
        """The version that this update publishes."""
        self.path = Path(begun.path)
        """Empty folder; if `push` writes files, the engines load from it."""
        self.is_leader: bool = begun.leader
        """Whether this rank writes the files and sends to the engines."""

    def push(
        self,
        source: Any,
        *,
        via: str | None = None,
        bucket_bytes: int | None = None,
        partial: bool = False,
    ) -> None:
        """Send the weights of a model or a state dict to the engines.

        Call it on every rank: all ranks gather sharded (FSDP2) weights together, bucket by bucket, and the
        leader sends them. Names, shapes and types are first compared with the files of the engines' model,
        because an engine reports success for any input. A transformers model is sent under the names of its
        files, a PEFT model with its LoRA layers merged.

        | via | how | engines pause |
        |---|---|---|
        | `"disk"` | the leader writes safetensors files, every engine loads them | while they load |
        | `"tensor"` | in HTTP requests, one per bucket | from here to the end of the block |
        | `"distributed"` | by broadcasts in a group with all engines (NCCL; gloo on a CPU) | as above |

        If engines are lost during the push, it continues with the others. An engine that missed weights gets
        no requests until it has the current weights: from the files, or else by the next update.

        Args:
            source: `torch.nn.Module` (plain, compiled, DDP, FSDP2, PEFT), a mapping of names to tensors, or
                the path of a folder with safetensors files that the leader wrote. A folder other than `path`
                is never removed; keep it until the next version is published.
            via: default: `trainer.publish`.
            bucket_bytes: default: `trainer.bucket_bytes`.
            partial: `source` contains only some of the weights; engines keep the others. With files, the
                others are added from the previous version.

        Raises:
            WeightsMismatch: the weights do not match the engines' model; raised on every rank, nothing was
                sent.
            PublishFailed: the leader could not write files.
            WeightUpdateFailed: no engine loaded the weights, after several tries.
        """
        self._must_be_open("push")
        if (partial or self._is_partial) and self._pushed != Pushed():
            raise HookStateError(
                "a partial push must be the only push of its update; this is the second push: push all "
                "weights of the update in one mapping"
            )
        if not isinstance(source, str | Path):
            self._pushed = self._pusher.push(
                source, self._begun, via=via, bucket_bytes=bucket_bytes, partial=partial
            )
            self._is_partial = partial
            return
        if partial:
            raise ValueError(
                "a pushed folder must contain all weights, because engines may load it again; found "
                "partial=True: leave it out, or push a mapping"
            )
        folder = Path(source).resolve()
        self._pusher.check_folder(folder, self._begun)
        self._pushed = Pushed(path=folder)

    def pause(self) -> None:
        """Pause the engines until the block ends, to send weights yourself. Only the leader's call acts.

        Raises:
            Stalled: an engine did not pause in time.
        """
        self._must_be_open("pause")
        if self.is_leader:
            self._pause_engines()

    def end(self) -> Pushed:
        """Close the block; returns what to publish. Called by the hook."""
        self._is_open = False
        return self._pushed if self.is_leader else Pushed()

    def _must_be_open(self, what: str) -> None:
        if not self._is_open:
            raise HookStateError(
                f"update.{what}() must be called inside its `with hook.update_weights()` block"
            )


class Updating:
    """The weight version that this rank knows, and the calls that publish the next version."""

    def __init__(self, session: Session, time: Stopwatch, *, pusher: Pusher, version: int) -> None:
        self.version = version
        self.pusher = pusher
        self._session = session
        self._time = time
        self._update: WeightUpdate | None = None
        self.sharing: EngineSharing | None = None
        """Set if nodes share engines."""

    def enter(self) -> WeightUpdate:
        """Wait for all ranks to enter."""
        with self._session.call(outside=True), self._time.updating():
            begun = self._begin() if self.sharing is None else self._begin_with_all(self.sharing)
            self._update = WeightUpdate(begun, pusher=self.pusher, pause_engines=self._pause)
            self._session.inside = f"the weight update to version {self._update.version}"
            return self._update

    def leave(self, error: BaseException | None) -> None:
        """Publish and wait for the engines; cancel if the block raised."""
        with self._session.leaving() as can_report, self._time.updating():
            update, self._update = self._update, None
            if update is None:
                return
            pushed = update.end()
            if self.sharing is not None and can_report:
                self.sharing.leave(
                    error,
                    publish=lambda: self._publish(update, pushed),
                    cancel=lambda: self._cancel(error or WeightUpdateFailed("another node's part failed")),
                )
            elif error is not None and can_report:
                self._cancel(error)
            elif error is None and can_report:
                self._publish(update, pushed)

    def _begin(self) -> m.UpdateBegun:
        connection = self._session.connection
        request = m.UpdateEnter(request=connection.next_number())
        connection.begin(request)
        try:
            begun = connection.wait(
                request.request,
                timeout_s=self._session.wait_timeout_s,
                waits_for=f"{self._session.name} waits for all ranks to enter update_weights",
            )
        except BaseException as error:
            if connection.is_pending(request.request):
                connection.forget(request.request)
                self._cancel(error)
            raise
        assert isinstance(begun, m.UpdateBegun)
        return begun

    def _begin_with_all(self, sharing: EngineSharing) -> m.UpdateBegun:
        sharing.settle()
        begun = self._begin()
        try:
            return sharing.enter(begun)
        except BaseException as error:
            self._cancel(error)
            raise

    def _pause(self) -> None:
        with self._session.call():
            self._session.ask(
                lambda number: m.UpdatePause(request=number),
                m.Reply,
                waits_for="the engines to pause",
                timeout_s=self._session.wait_timeout_s,
            )

    def _publish(self, update: WeightUpdate, pushed: Pushed) -> None:
        done = self._session.ask(
            lambda number: m.UpdatePublish(
                request=number,
                leader=update.is_leader,
                path=None if pushed.path is None else str(pushed.path),
                is_streamed=pushed.is_streamed,
                probes=list(pushed.probes),
                scored=pushed.scored,
                version=update.version if self.sharing is not None else None,
            ),
            m.UpdateDone,
            waits_for=f"all ranks and engines to confirm version {update.version}",
            timeout_s=self._session.wait_timeout_s,
        )
        self.version = done.version
        self._time.bubble_s += done.bubble_s

    def _cancel(self, error: BaseException) -> None:
        connection = self._session.connection
        text = f"{type(error).__name__}: {error}"
        connection.post(m.UpdateCancel(request=connection.next_number(), text=text))
