"""Streams weights to the paused engines, bucket by bucket, without permanent files.

| the leader waits | for | at most |
|---|---|---|
| for each stage | every engine to complete it | the hub's `stall_s`, and the engines' deadlines |
| to join a group | every worker of every engine | `GROUP_TIMEOUT_S` |
| for a broadcast | all receivers, or the loss of an engine | `GROUP_TIMEOUT_S` per tensor |

Invariant: a broken stream sends nothing more, leaves its group, and sets `failure`; gathering continues,
because other ranks take part in it.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from trainer_hook import messages as m
from trainer_hook.errors import HookError, PublishFailed, StreamBroken
from trainer_hook.model.probes import Probes
from trainer_hook.weights.gathering import num_bytes, on_host
from trainer_hook.weights.update_group import UpdateGroup, meeting_address, serve_store

if TYPE_CHECKING:
    import torch

_POLL_S = 0.001


class EnginePort(Protocol):
    """The engines' side of a stream. Errors are raised as their own class."""

    def begin(self, stage: m.Stage) -> int:
        """Request a stage; returns its number."""

    def has_ended(self, number: int) -> bool:
        """Whether `finish` would return or raise immediately."""

    def finish(self, number: int) -> m.Audience | None:
        """Wait until all engines complete a stage; an opening returns the participants."""


class StageStream:
    """One pass of all weights: `send` for every bucket, then `close`."""

    def __init__(self, engines: EnginePort, opening: m.OpenStream, probes: Probes) -> None:
        self._opening = opening
        self.probes = probes
        self.failure: HookError | None = None
        """Why the stream broke; None: it works."""
        self._engines = engines
        self._pending: int | None = None
        """The open stage."""

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Move a full tensor to the device it is sent from."""
        raise NotImplementedError

    def send(self, bucket: "Mapping[str, torch.Tensor]") -> None:
        """Send a bucket, after the previous bucket has arrived."""
        if self.failure is None:
            self.probes.look(bucket)
            self._guard(lambda: self._send(bucket))

    def close(self) -> None:
        """Wait for the last bucket, and for every engine to confirm that it has all weights."""
        if self.failure is None:
            self._guard(self._seal)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except HookError as error:
            self.failure = error
        except RuntimeError as error:  # from torch: a member of the group is lost
            self.failure = StreamBroken(f"a broadcast of weights broke: {error}")
        if self.failure is not None:
            self._give_up()
            with suppress(HookError):
                self._finish()

    def _open(self) -> m.Audience:
        self._begin(self._opening)
        audience = self._finish()
        assert audience is not None
        return audience

    def _begin(self, stage: m.Stage) -> None:
        assert self._pending is None, "stages follow one another"
        self._pending = self._engines.begin(stage)

    def _finish(self) -> m.Audience | None:
        number, self._pending = self._pending, None
        return None if number is None else self._engines.finish(number)

    def _seal(self) -> None:
        self._finish()
        self._begin(m.SealStream(probes=self.probes.chosen))
        self._finish()

    def _send(self, bucket: "Mapping[str, torch.Tensor]") -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        """Release members that wait for this side."""


class TensorStream(StageStream):
    """Buckets as files in `folder`, at most two, which the generator sends to the engines over HTTP."""

    def __init__(self, engines: EnginePort, opening: m.OpenStream, probes: Probes, folder: Path) -> None:
        super().__init__(engines, opening, probes)
        self._folder = folder
        self._num_sent = 0
        self._sent: Path | None = None
        self._guard(self._start)

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return on_host(tensor)

    def _start(self) -> None:
        self._open()

    def _send(self, bucket: "Mapping[str, torch.Tensor]") -> None:
        self._num_sent += 1
        path = self._folder / f"bucket-{self._num_sent:05}"
        self._write(path, bucket)
        self._finish()
        self._remove()
        self._sent = path
        self._begin(m.TakeTensors(path=str(path)))

    def _write(self, path: Path, bucket: "Mapping[str, torch.Tensor]") -> None:
        """Tensors by value: a pickle that every SGLang release accepts, from any machine."""
        try:
            with open(path, "wb", opener=_private) as file:
                pickle.dump(list(bucket.items()), file, protocol=4)
        except OSError as error:
            path.unlink(missing_ok=True)
            size = sum(map(num_bytes, bucket.values()))
            raise PublishFailed(
                f"a bucket of {size} bytes of weights must be written to {self._folder}: {error}; free space "
                "there, name another folder by trainer.weights_dir, or make trainer.bucket_bytes smaller"
            ) from error

    def close(self) -> None:
        super().close()
        self._remove()

    def _give_up(self) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._sent is not None:
            self._sent.unlink(missing_ok=True)
            self._sent = None


class BroadcastStream(StageStream):
    """Broadcasts in a group of the leader and the engines' workers; the next update reuses the group."""

    def __init__(
        self,
        engines: EnginePort,
        opening: m.OpenStream,
        probes: Probes,
        group: UpdateGroup | None,
        *,
        backend: str,
    ) -> None:
        super().__init__(engines, opening, probes)
        self.group = group
        """For the next stream; None after leaving it."""
        self._backend = backend
        self._guard(self._meet)

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor.to("cpu" if self._backend == "gloo" else "cuda").contiguous()

    def _meet(self) -> None:
        """Join or reuse a group with every worker of every engine."""
        audience = self._open()
        if self.group is not None and self.group.name == audience.group:
            return
        former = None if self.group is None else self.group.name
        self._leave()
        address = meeting_address(audience.urls)
        store, port = serve_store(address)
        name = f"fa_rollout-{uuid4().hex}"
        self._begin(
            m.JoinGroup(
                group=name,
                former=former,
                address=address,
                port=port,
                backend=self._backend,
            )
        )
        size = 1 + audience.num_workers
        self.group = self._joined(
            lambda: UpdateGroup.join(
                store, address=address, name=name, rank=0, world_size=size, backend=self._backend
            )
        )
        self._finish()

    def _joined(self, join: Callable[[], UpdateGroup]) -> UpdateGroup:
        """The group, once all members have joined; a refusal of the engines ends the wait."""
        meeting: Future[UpdateGroup] = Future()

        def meet() -> None:
            try:
                meeting.set_result(join())
            except BaseException as error:  # raised again by the waiting thread
                meeting.set_exception(error)

        # A thread, because torch's wait cannot be interrupted; an abandoned thread ends at its deadline
        threading.Thread(target=meet, name="update group", daemon=True).start()
        while not meeting.done():
            assert self._pending is not None
            if self._engines.has_ended(self._pending):
                self._finish()
                break
            time.sleep(_POLL_S)
        return meeting.result()

    def _send(self, bucket: "Mapping[str, torch.Tensor]") -> None:
        assert self.group is not None
        self._begin(
            m.TakeBroadcast(
                group=self.group.name,
                names=list(bucket),
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                shapes=[list(tensor.shape) for tensor in bucket.values()],
            )
        )
        works = [self.group.broadcast(tensor) for tensor in bucket.values()]
        self._watch(works)
        for work in works:
            work.wait()
        self._finish()

    def _watch(self, works: list[Any]) -> None:
        """Wait for the broadcasts to finish; a refusal of the engines ends the wait."""
        deadline_s = time.monotonic() + m.GROUP_TIMEOUT_S * max(1, len(works))
        while not all(work.is_completed() for work in works):
            assert self._pending is not None
            if self._engines.has_ended(self._pending):
                self._finish()
                return
            if time.monotonic() > deadline_s:
                raise StreamBroken(f"broadcasts of weights must end, these did not: {works}")
            time.sleep(_POLL_S)

    def _give_up(self) -> None:
        self._leave(abort=True)

    def _leave(self, *, abort: bool = False) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.leave(abort=abort)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
