"""Weight updates, from the side of one rank.

| a rank waits | until |
|---|---|
| on entering the block | all ranks have entered |
| in `pause` (the leader) | the engines stand still |
| on leaving the block | all ranks have left and every engine has confirmed the version |

Invariant: a block that raises publishes nothing. The engines stand still from `pause` to the end of the
block, or, without it, only while they load.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook import messages as m
from trainer_hook.errors import HookStateError
from trainer_hook.publish import publish
from trainer_hook.session import Session
from trainer_hook.stopwatch import Stopwatch


class WeightUpdate:
    """The version to be published, and ways to get its weights to the engines."""

    def __init__(self, begun: m.UpdateBegun, *, pause_engines: Callable[[], None]) -> None:
        self._pause_engines = pause_engines
        self._is_open = True
        self._folder: Path | None = None
        """What the engines will load."""
        self.version: int = begun.version
        """The version that this update publishes."""
        self.path = Path(begun.path)
        """Empty folder; the engines load from it if `push` is called."""
        self.is_leader: bool = begun.leader
        """Whether this rank writes files and speaks for the others."""

    def push(self, source: Any) -> None:
        """Hand over the weights of a model or a state dict: the leader writes them for the engines to load.

        Every rank calls it, since sharded (FSDP2) weights are gathered by all of them. Engines go on
        generating meanwhile, and stand still only while they load, at the end of the block.

        Args:
            source: `torch.nn.Module` (plain, compiled, DDP, FSDP2), a mapping of names to tensors, or the
                path of a folder where the leader has written safetensors files itself. A folder other than
                `path` stays yours, and must stay until the next version is published.

        Raises:
            PublishFailed: the leader could not write the files.
        """
        self._must_be_open("push")
        if isinstance(source, str | Path):
            self._folder = Path(source).resolve()
            return
        publish(source, self.path, write=self.is_leader)
        self._folder = self.path

    def pause(self) -> None:
        """Have the engines stand still until the block ends, to push by hand; the leader's call does it.

        Raises:
            Stalled: an engine did not stop in time.
        """
        self._must_be_open("pause")
        if self.is_leader:
            self._pause_engines()

    def end(self) -> str | None:
        """Close the body; the folder that the engines are to load, if there is one. Called by the hook."""
        self._is_open = False
        return str(self._folder) if self.is_leader and self._folder is not None else None

    def _must_be_open(self, what: str) -> None:
        if not self._is_open:
            raise HookStateError(
                f"update.{what}() must be called inside its `with hook.update_weights()` block"
            )


class Updating:
    """The version that this rank knows, and how it gets to the next one."""

    def __init__(self, session: Session, time: Stopwatch, *, version: int) -> None:
        self.version = version
        self._session = session
        self._time = time
        self._update: WeightUpdate | None = None

    def enter(self) -> WeightUpdate:
        """Wait for all ranks to enter."""
        with self._session.call(outside=True), self._time.updating():
            self._update = WeightUpdate(self._begin(), pause_engines=self._pause)
            self._session.inside = f"the weight update to version {self._update.version}"
            return self._update

    def leave(self, error: BaseException | None) -> None:
        """Publish and wait for the engines; or cancel, when the block raised."""
        with self._session.leaving() as can_report, self._time.updating():
            update, self._update = self._update, None
            if update is None:
                return
            path = update.end()
            if error is not None and can_report:
                self._cancel(error)
            elif error is None and can_report:
                self._publish(update, path)

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

    def _pause(self) -> None:
        with self._session.call():
            self._session.ask(
                m.UpdatePause,
                waits_for="the engines to stand still",
                timeout_s=self._session.wait_timeout_s,
            )

    def _publish(self, update: WeightUpdate, path: str | None) -> None:
        done = self._session.ask(
            m.UpdatePublish,
            waits_for=f"all ranks and engines to take version {update.version}",
            timeout_s=self._session.wait_timeout_s,
            leader=update.is_leader,
            path=path,
        )
        assert isinstance(done, m.UpdateDone)
        self.version = done.version
        self._time.bubble_s += done.bubble_s

    def _cancel(self, error: BaseException) -> None:
        connection = self._session.connection
        text = f"{type(error).__name__}: {error}"
        connection.post(m.UpdateCancel(request=connection.next_number(), text=text))
