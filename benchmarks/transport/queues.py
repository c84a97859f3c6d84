"""Contenders that copy through a pipe or a buffer of their own, or hand tensors over one by one."""

import pickle
import tempfile
import time
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.transport.contender import Received
from benchmarks.transport.workload import Form, Group

_DEPTH = 16
"""Messages in flight where a contender counts messages."""


def message(group: Group, form: Form, stamp_ns: int) -> tuple[Any, ...]:
    """What is pickled: the arrays of all samples, or one packed array a column."""
    arrays = group.packed() if form is Form.PACKED else group.arrays
    return stamp_ns, arrays, group.lens, group.blobs, group.rewards


def received(content: tuple[Any, ...]) -> Received:
    """A pickled message as tensors."""
    return Received(content[0], [torch.from_numpy(array) for array in content[1]])


class _Idle:
    """Parts that most contenders do not need."""

    max_group_bytes = 1 << 40

    def flush(self) -> None:
        pass

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass

    def helper_cpu_s(self) -> float:
        return 0.0


class MpQueue(_Idle):
    """`multiprocessing.Queue`."""

    def __init__(self, context: SpawnContext) -> None:
        self._queue: Any = context.Queue(_DEPTH)

    def producer(self) -> "MpQueue":
        return self

    def consumer(self) -> "MpQueue":
        return self

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        self._queue.put(message(group, form, stamp_ns))

    def receive(self, form: Form) -> Received:
        return received(self._queue.get())


class TorchQueue(MpQueue):
    """`torch.multiprocessing.Queue`, file-descriptor strategy: each tensor a shared segment of its own."""

    def __init__(self, context: SpawnContext) -> None:
        self._queue = torch.multiprocessing.get_context("spawn").Queue(_DEPTH)

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        stamp, arrays, *rest = message(group, form, stamp_ns)
        self._queue.put((stamp, [torch.from_numpy(array) for array in arrays], *rest))

    def receive(self, form: Form) -> Received:
        content = self._queue.get()
        return Received(content[0], content[1])


class FasterFifo(MpQueue):
    """`faster_fifo.Queue`: pickled messages through one shared buffer."""

    def __init__(self, context: SpawnContext) -> None:
        import faster_fifo  # type: ignore[import-not-found,unused-ignore]

        self._queue = faster_fifo.Queue(max_size_bytes=64 << 20)

    def __getstate__(self) -> dict[str, Any]:
        import faster_fifo_reduction  # type: ignore  # noqa: F401 - makes queues picklable

        return self.__dict__

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        self._queue.put(message(group, form, stamp_ns), timeout=60)

    def receive(self, form: Form) -> Received:
        return received(self._queue.get(timeout=60))


class Pipe(_Idle):
    """`multiprocessing.Pipe` with pickle 5, in band."""

    def __init__(self, context: SpawnContext) -> None:
        self._far, self._near = context.Pipe(duplex=False)

    def producer(self) -> "Pipe":
        self._far.close()
        return self

    def consumer(self) -> "Pipe":
        self._near.close()
        return self

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        self._near.send_bytes(pickle.dumps(message(group, form, stamp_ns), protocol=5))

    def receive(self, form: Form) -> Received:
        return received(pickle.loads(self._far.recv_bytes()))


class Zmq(_Idle):
    """pyzmq PUSH and PULL over ipc, pickle 5 with the arrays as frames of their own, not copied by pyzmq."""

    def __init__(self, context: SpawnContext) -> None:
        self._folder = tempfile.mkdtemp()
        self._address = f"ipc://{Path(self._folder, 'socket')}"
        self._socket: Any = None

    def producer(self) -> "Zmq":
        self._open("PUSH", "SNDHWM").bind(self._address)
        return self

    def consumer(self) -> "Zmq":
        while not Path(self._folder, "socket").exists():
            time.sleep(0.01)
        self._open("PULL", "RCVHWM").connect(self._address)
        return self

    def _open(self, kind: str, limit: str) -> Any:
        import zmq

        self._socket = zmq.Context.instance().socket(getattr(zmq, kind))
        self._socket.setsockopt(getattr(zmq, limit), _DEPTH)
        self._socket.setsockopt(zmq.LINGER, 0)
        return self._socket

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(message(group, form, stamp_ns), protocol=5, buffer_callback=buffers.append)
        self._socket.send_multipart([header, *buffers], copy=False)

    def receive(self, form: Form) -> Received:
        header, *frames = self._socket.recv_multipart(copy=False)
        # pyzmq's own buffers are read-only: the arrays are built on them as they are.
        content = pickle.loads(header.buffer, buffers=[frame.buffer for frame in frames])
        return received(content)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
