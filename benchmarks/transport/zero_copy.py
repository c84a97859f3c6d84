"""Contenders that keep messages in shared memory and hand a reference over: iceoryx2, Ray's object store."""

import ctypes
import os
import pickle
import queue
import secrets
from multiprocessing.connection import Client
from multiprocessing.context import SpawnContext
from typing import Any

import numpy as np

from benchmarks.transport.contender import Received
from benchmarks.transport.queues import message, received
from benchmarks.transport.workload import Form, Group

_DEPTH = 16
_NAMESPACE = "transport"
_MAX_MESSAGE_BYTES = 16 << 20


class Iceoryx2:
    """Publish and subscribe of a byte slice: a pickle-5 header, then the arrays, each at a multiple of 64."""

    max_group_bytes = _MAX_MESSAGE_BYTES

    def __init__(self, context: SpawnContext) -> None:
        self._name = f"fa_rollout/{os.getpid()}/{secrets.token_hex(4)}"

    def _service(self) -> tuple[Any, Any, Any]:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        data = (
            node.service_builder(iox2.ServiceName.new(self._name))
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(_DEPTH)
            .payload_alignment(iox2.Alignment.new(64))
            .open_or_create()
        )
        event = node.service_builder(iox2.ServiceName.new(self._name)).event().open_or_create()
        return node, data, event

    def producer(self) -> "Iceoryx2Producer":
        return Iceoryx2Producer(*self._service())

    def consumer(self) -> "Iceoryx2Consumer":
        return Iceoryx2Consumer(*self._service())

    def helper_cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Iceoryx2Producer:
    """Loans, fills, sends, notifies."""

    def __init__(self, node: Any, data: Any, event: Any) -> None:
        import iceoryx2 as iox2

        self._keep = node, data, event
        self._publisher = (
            data.publisher_builder()
            .initial_max_slice_len(_MAX_MESSAGE_BYTES)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = event.notifier_builder().create()

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(message(group, form, stamp_ns), protocol=5, buffer_callback=buffers.append)
        raws = [buffer.raw() for buffer in buffers]
        offset = (8 + 8 * len(raws) + len(header) + 63) & -64
        sizes = [len(header)]
        places = []
        for raw in raws:
            places.append(offset)
            sizes.append(raw.nbytes)
            offset = (offset + raw.nbytes + 63) & -64
        sample = self._publisher.loan_slice_uninit(offset)
        view = np.ctypeslib.as_array(
            ctypes.cast(sample.payload().as_ptr(), ctypes.POINTER(ctypes.c_uint8)), (offset,)
        )
        table = np.array([len(raws), *sizes], np.int32).tobytes()
        prefix = table + header
        view[: len(prefix)] = np.frombuffer(prefix, np.uint8)
        for place, raw in zip(places, raws, strict=True):
            view[place : place + raw.nbytes] = np.frombuffer(raw, np.uint8)
        sample.assume_init().send()
        self._notifier.notify()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._publisher.delete()


class Iceoryx2Consumer:
    """Waits for the event, receives, and lets the sample go when the group is done with."""

    def __init__(self, node: Any, data: Any, event: Any) -> None:
        import iceoryx2 as iox2

        self._keep = node, data, event
        self._subscriber = data.subscriber_builder().buffer_size(_DEPTH).create()
        self._listener = event.listener_builder().create()
        self._second = iox2.Duration.from_secs(1)
        self._sample: Any = None

    def receive(self, form: Form) -> Received:
        while (sample := self._subscriber.receive()) is None:
            self._listener.timed_wait(self._second)
        self._sample = sample
        view = sample.payload().as_memory_view().cast("B")
        num_buffers, header_bytes, *_ = np.frombuffer(view, np.int32, 2)
        sizes = np.frombuffer(view, np.int32, num_buffers, 8).tolist()
        start = 8 + 4 * num_buffers
        offset = (8 + 8 * num_buffers + header_bytes + 63) & -64
        buffers = []
        for size in sizes:
            buffers.append(view[offset : offset + size])
            offset = (offset + size + 63) & -64
        return received(pickle.loads(view[start : start + header_bytes], buffers=buffers))

    def done(self) -> None:
        if self._sample is not None:
            self._sample.delete()
            self._sample = None

    def close(self) -> None:
        self._subscriber.delete()


class Ray:
    """`ray.put` in a driver, the reference by a call to the consumer, which is an actor, `ray.get` there."""

    max_group_bytes = 1 << 40

    def __init__(self, context: SpawnContext) -> None:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 << 20)
        self._address = ray.get_runtime_context().gcs_address
        self._name = f"consumer-{secrets.token_hex(4)}"
        self._actor: Any = None
        self._serving: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": self._address, "_name": self._name}

    def start_consumer(self, address: str, key: bytes) -> None:
        """Start the actor, which answers the parent at `address` as any consuming process does."""
        import ray

        options = {"name": self._name, "namespace": _NAMESPACE, "num_cpus": 0, "max_concurrency": 4}
        self._actor = ray.remote(_RayActor).options(**options).remote(os.getcwd())
        self._serving = self._actor.serve.remote(address, key)

    def producer(self) -> "RayProducer":
        import ray

        ray.init(address=self._address, namespace=_NAMESPACE, log_to_driver=False)
        return RayProducer(ray.get_actor(self._name))

    def consumer(self) -> "RayConsumer":
        raise AssertionError("the consumer is an actor")

    def helper_cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        import ray

        ray.shutdown()


class RayProducer:
    """Puts arrays into the object store, at most so many calls ahead."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._calls: list[Any] = []

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        import ray

        self._calls.append(self._actor.push.remote([ray.put(message(group, form, stamp_ns))]))
        if len(self._calls) > _DEPTH:
            _, self._calls = ray.wait(self._calls, num_returns=1)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        import ray

        ray.shutdown()


class _RayActor:
    """The consuming process: one thread measures, another takes references in."""

    def __init__(self, folder: str) -> None:
        import sys

        sys.path.insert(0, folder)
        self._references: queue.Queue[Any] = queue.Queue(_DEPTH)

    def serve(self, address: str, key: bytes) -> None:
        from benchmarks.transport.pair import memory, serve_consumer

        start = memory()
        with Client(address, authkey=key) as parent:
            serve_consumer(parent, RayConsumer(self._references), start)

    def push(self, references: list[Any]) -> None:
        self._references.put(references[0])


class RayConsumer:
    """Gets what the references stand for."""

    def __init__(self, references: "queue.Queue[Any]") -> None:
        self._references = references

    def receive(self, form: Form) -> Received:
        import ray

        return received(ray.get(self._references.get()))

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass
