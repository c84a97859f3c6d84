"""One contender's two processes, and what is measured of them.

The parent tells both what to do; they answer with times and CPU seconds. The clock is CLOCK_MONOTONIC.
"""

import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Listener
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch

from benchmarks.transport.contender import Consumer, Contender, Producer, make
from benchmarks.transport.workload import SIZES, Form, Group, Size, make_groups, memcpy_s, touch

_RATE_HZ = 200
_REPLY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One stream of groups."""

    num_groups: int
    wall_s: float
    producer_cpu_s: float
    consumer_cpu_s: float
    helper_cpu_s: float
    memcpy_s: float
    """Of one group, measured in the producer just before."""

    @property
    def groups_per_s(self) -> float:
        """Groups a second, from the first send to the last touch."""
        return self.num_groups / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Growth of a process since it was started, in bytes."""

    private: int
    shared: int


class Pair:
    """A producer and a consumer of one contender."""

    def __init__(self, name: str, context: SpawnContext) -> None:
        self.name = name
        self._contender: Contender = make(name, context)
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        for serve in (serve_producer, serve_consumer):
            self._ends.append(self._start(serve, context))
        self._ask_both(("ready",))

    def _start(self, serve: Callable[..., None], context: SpawnContext) -> Connection:
        start_actor = getattr(self._contender, "start_consumer", None)
        if start_actor is not None and serve is serve_consumer:
            key = secrets.token_bytes(16)
            with Listener(family="AF_UNIX", authkey=key) as listener:
                start_actor(listener.address, key)
                end = listener.accept()
                assert isinstance(end, Connection)
                return end
        near, far = context.Pipe()
        process = context.Process(target=_run, args=(serve, far, self._contender), daemon=True)
        process.start()
        far.close()
        self._processes.append(process)
        return near

    def _ask_both(self, command: tuple[Any, ...]) -> tuple[Any, Any]:
        # The consumer first, so that it waits when the first group comes.
        for end in reversed(self._ends):
            end.send(command)
        answers = []
        for end in self._ends:
            if not end.poll(_REPLY_S):
                raise TimeoutError(f"{self.name} did not answer {command} within {_REPLY_S} s")
            answers.append(end.recv())
        return answers[0], answers[1]

    def takes(self, size: Size) -> bool:
        """Whether groups of this size fit."""
        return size.num_bytes <= self._contender.max_group_bytes

    def touch_us(self, size: Size, form: Form) -> float:
        """CPU microseconds to make the tensors of a group that is there, and to touch them."""
        _, cost = self._ask_both(("touch", size, form))
        return float(cost)

    def stream(self, size: Size, form: Form, num_groups: int) -> Throughput:
        """Send so many groups as fast as it goes."""
        before_s = self._contender.helper_cpu_s()
        (start_ns, copy_s, producer_cpu_s), (end_ns, consumer_cpu_s) = self._ask_both(
            ("stream", size, form, num_groups)
        )
        return Throughput(
            num_groups=num_groups,
            wall_s=(end_ns - start_ns) / 1e9,
            producer_cpu_s=producer_cpu_s,
            consumer_cpu_s=consumer_cpu_s,
            helper_cpu_s=self._contender.helper_cpu_s() - before_s,
            memcpy_s=copy_s,
        )

    def latencies_us(self, size: Size, form: Form, num_groups: int) -> list[float]:
        """From before the serialisation to the tensors, at 200 groups a second."""
        _, delays = self._ask_both(("latency", size, form, num_groups))
        return [delay / 1e3 for delay in delays]

    def idle_cpu(self, seconds: float) -> tuple[float, float, float]:
        """Share of a CPU that producer, consumer and helper take while nothing is sent."""
        before_s = self._contender.helper_cpu_s()
        shares = self._ask_both(("idle", seconds))
        return *shares, (self._contender.helper_cpu_s() - before_s) / seconds

    def memory(self) -> tuple[Memory, Memory]:
        """Growth of both processes since they were ready."""
        return self._ask_both(("memory",))

    def close(self) -> None:
        """End both processes."""
        for end in self._ends:
            with suppress(OSError):
                end.send(("quit",))
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._contender.close()


# --- in the two processes ------------------------------------------------------------------------------


def _run(serve: Callable[..., None], parent: Connection, contender: Contender) -> None:
    start = memory()
    if serve is serve_producer:
        serve_producer(parent, contender.producer(), start)
    else:
        serve_consumer(parent, contender.consumer(), start)


@cache
def _groups(size: Size) -> list[Group]:
    return make_groups(size)


def serve_producer(parent: Connection, producer: Producer, start: Memory) -> None:
    """Do what the parent says, until it says quit."""
    while (command := parent.recv())[0] != "quit":
        match command:
            case ("ready",) | ("touch", _, _):
                parent.send(None)
            case ("memory",):
                parent.send(_growth(start))
            case ("stream", size, form, num_groups):
                parent.send(_produce(producer, size, form, num_groups, memcpy_s(size)))
            case ("latency", size, form, num_groups):
                _produce_slowly(producer, size, form, num_groups)
                parent.send(None)
            case ("idle", seconds):
                cpu_s = time.process_time()
                time.sleep(seconds)
                share = (time.process_time() - cpu_s) / seconds
                _produce(producer, SIZES[0], Form.PACKED, 1, 0.0)
                parent.send(share)
    producer.close()


def _produce(
    producer: Producer, size: Size, form: Form, num_groups: int, copy_s: float
) -> tuple[int, float, float]:
    groups = _groups(size)
    start_ns, cpu_s = time.monotonic_ns(), time.process_time()
    for index in range(num_groups):
        producer.send(groups[index % len(groups)], form, 0)
    producer.flush()
    return start_ns, copy_s, time.process_time() - cpu_s


def _produce_slowly(producer: Producer, size: Size, form: Form, num_groups: int) -> None:
    groups = _groups(size)
    next_s = time.monotonic()
    for index in range(num_groups):
        next_s += 1 / _RATE_HZ
        time.sleep(max(0.0, next_s - time.monotonic()))
        producer.send(groups[index % len(groups)], form, time.monotonic_ns())
        producer.flush()


def serve_consumer(parent: Connection, consumer: Consumer, start: Memory) -> None:
    """Do what the parent says, until it says quit."""
    warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
    torch.set_num_threads(1)
    while (command := parent.recv())[0] != "quit":
        match command:
            case ("ready",):
                parent.send(None)
            case ("memory",):
                parent.send(_growth(start))
            case ("touch", size, form):
                parent.send(_touch_us(size, form))
            case ("stream", _, form, num_groups):
                parent.send(_consume(consumer, form, num_groups))
            case ("latency", _, form, num_groups):
                parent.send(_delays(consumer, form, num_groups))
            case ("idle", seconds):
                cpu_s = time.process_time()
                consumer.receive(Form.PACKED)
                parent.send((time.process_time() - cpu_s) / seconds)
                consumer.done()
    consumer.close()


def _consume(consumer: Consumer, form: Form, num_groups: int) -> tuple[int, float]:
    cpu_s = time.process_time()
    for _ in range(num_groups):
        message = consumer.receive(form)
        touch(form, message.tensors)
        del message
        consumer.done()
    return time.monotonic_ns(), time.process_time() - cpu_s


def _touch_us(size: Size, form: Form) -> float:
    groups = [group.packed() if form is Form.PACKED else group.arrays for group in _groups(size)]
    rounds = max(6, min(3000, (1 << 28) // size.num_bytes))
    cpu_s = time.process_time()
    for index in range(rounds):
        touch(form, [torch.from_numpy(array) for array in groups[index % len(groups)]])
    return (time.process_time() - cpu_s) / rounds * 1e6


def _delays(consumer: Consumer, form: Form, num_groups: int) -> list[int]:
    delays = []
    for _ in range(num_groups):
        message = consumer.receive(form)
        delays.append(time.monotonic_ns() - message.stamp_ns)
        del message
        consumer.done()
    return delays


def memory() -> Memory:
    """What this process has mapped now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private, shared = (int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))
    return Memory(private=private, shared=shared)


def _growth(start: Memory) -> Memory:
    now = memory()
    return Memory(private=now.private - start.private, shared=now.shared - start.shared)
