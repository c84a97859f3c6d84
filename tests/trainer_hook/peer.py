"""The other side of a hook, in small: a ring with groups in it, and the hub's end of a connection.

`Ring` writes real records into a real segment. `Hub` listens on a real Unix socket and lets ranks in; what it
does then is the test's script: a function that receives and sends messages at the hub's end, in a thread of
its own. Run as a program, this file is a hub in a process of its own, for tests that stop or kill it.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from shm import Descriptor, Field, RingReader, RingWriter
from shm.channels.channel import Channel
from shm.channels.endpoint import listen
from shm.ring.segment import Segment
from trainer_hook import messages as m
from trainer_hook.batches.batch import Batch
from trainer_hook.batches.group import open_groups
from trainer_hook.batches.leases import Leases
from trainer_hook.messages import Batch as BatchMessage
from trainer_hook.messages import Handout, Part
from trainer_hook.record import COLUMNS, RecordHead, TokenSampling, run_number, schema_fingerprint

RUN = "run-of-a-test"
TOKEN = "token-of-a-test"
M = TypeVar("M", bound=m.Message)


@dataclass(slots=True, kw_only=True)
class Completion:
    """A sample to be written."""

    prompt: Sequence[int]
    response: Sequence[int]
    reward: float = 0.0
    mask: Sequence[int] | None = None
    spans: Sequence[tuple[int, int]] | None = None
    """(version, end); None: all of version 0."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def logprobs(self) -> list[float]:
        return [-0.5 - index for index in range(len(self.response))]


def head_of(group: int, completions: Sequence[Completion], **changes: Any) -> RecordHead:
    rewards = [completion.reward for completion in completions]
    head = RecordHead(
        group=group,
        attempt=0,
        epoch=0,
        prompt_index=group,
        prompt=f"prompt {group}",
        label=str(group),
        members=list(range(len(completions))),
        finish_reasons=["stop"] * len(completions),
        sampling=TokenSampling(),
        reward_mean=float(np.mean(rewards)),
        reward_std=float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0,
        reward_count=len(rewards),
        started_s=0.0,
        finished_s=1.0,
        metadata={"row": group},
        sample_metadata=[completion.metadata for completion in completions],
    )
    return msgspec.structs.replace(head, **changes)


def columns_of(completions: Sequence[Completion]) -> dict[str, np.ndarray[Any, Any]]:
    def offsets(lengths: list[int]) -> list[int]:
        return [0, *np.cumsum(lengths).tolist()]

    spans = [
        completion.spans if completion.spans is not None else [(0, len(completion.response))]
        for completion in completions
    ]
    values: dict[str, Any] = {
        "tokens": [token for c in completions for token in (*c.prompt, *c.response)],
        "cu_seqlens": offsets([len(c.prompt) + len(c.response) for c in completions]),
        "cu_responses": offsets([len(c.response) for c in completions]),
        "logprobs": [value for c in completions for value in c.logprobs],
        "loss_mask": [
            v for c in completions for v in (c.mask if c.mask is not None else [1] * len(c.response))
        ],
        "span_versions": [version for of_sample in spans for version, _ in of_sample],
        "span_ends": [end for of_sample in spans for _, end in of_sample],
        "cu_spans": offsets([len(of_sample) for of_sample in spans]),
        "rewards": [c.reward for c in completions],
    }
    return {column.name: np.array(values[column.name], column.dtype) for column in COLUMNS}


class Ring:
    """A segment and its writer."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self.segment = Segment.create(size_bytes, prefault=False)
        self.writer = RingWriter(
            self.segment,
            run=run_number(RUN),
            schema=schema_fingerprint(),
            incarnation=1,
            head=0,
            tail=0,
            sequence=0,
        )

    def write(self, group: int, completions: Sequence[Completion], **changes: Any) -> Handout:
        head = msgspec.msgpack.encode(head_of(group, completions, **changes))
        return self.write_raw(head, list(columns_of(completions).values()))

    def write_raw(self, head: bytes, arrays: Sequence[np.ndarray[Any, Any]]) -> Handout:
        with self.writer.claim(head, [Field(array.dtype, array.shape) for array in arrays]) as claim:
            for target, array in zip(claim.arrays, arrays, strict=True):
                target[...] = array
            return handout(claim.commit())

    def overwrite(self) -> None:
        """What a later lap of the ring would do to records that were given back."""
        self.segment.array[:] = 0xEE


def handout(descriptor: Descriptor) -> Handout:
    return Handout(**descriptor._asdict())


def reader_of(ring: Ring) -> RingReader:
    segment = Segment.attach(os.dup(ring.segment.fd), writable=False)
    return RingReader(segment, run=run_number(RUN), schema=schema_fingerprint())


def batch_of(
    ring: Ring,
    records: Sequence[Handout],
    micro_batches: Sequence[Sequence[Part]],
    *,
    copy: bool = False,
    leases: Leases | None = None,
) -> Batch:
    message = BatchMessage(
        request=1,
        step=4,
        version=5,
        records=list(records),
        micro_batches=[list(parts) for parts in micro_batches],
        num_groups_global=2,
        num_samples_global=4,
        num_rewards_global=4,
        num_tokens_global=7,
        num_ranks_global=2,
        reward_mean=0.875,
        staleness_max=2,
        wait_s=0.0,
    )
    groups = open_groups(reader_of(ring), message.records, copy=copy)
    if leases is not None:
        leases.add(message.step, groups)
    return Batch(message, groups, keep=copy)


# --- the hub's end --------------------------------------------------------------------------------------


def batch(
    request: m.Next, records: Sequence[Handout], micro_batches: Sequence[Sequence[Part]], **changes: Any
) -> m.Batch:
    """An answer to `Next`."""
    plain: dict[str, Any] = {
        "version": 0,
        "num_groups_global": len(records),
        "num_samples_global": sum(map(len, micro_batches)),
        "num_rewards_global": sum(map(len, micro_batches)),
        "num_tokens_global": 1,
        "num_ranks_global": 1,
        "reward_mean": 0.0,
        "staleness_max": 0,
        "wait_s": 0.0,
        "request": request.request,
        "step": request.step,
    }
    return m.Batch(
        records=list(records), micro_batches=[list(parts) for parts in micro_batches], **{**plain, **changes}
    )


class Line:
    """The hub's end of one rank's connection."""

    def __init__(self, channel: Channel, ring: Ring) -> None:
        self.channel = channel
        self.ring = ring
        self.hello: m.Hello | None = None

    def receive(self, kind: type[M], timeout_s: float = 10.0) -> M:
        """The next message, which must be of a kind."""
        message = m.decode(self.channel.receive(timeout_s))
        assert isinstance(message, kind), f"expected {kind.__name__}, the rank sent {message}"
        return message

    def send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        self.channel.send(m.encode(message), fds=fds)

    def let_in(self, **changes: Any) -> None:
        """Hello and Welcome."""
        self.hello = self.receive(m.Hello)
        plain: dict[str, Any] = {
            "run": RUN,
            "attach": 1,
            "ring_bytes": self.ring.segment.size_bytes,
            "step": 0,
            "version": 0,
            "lineage": "main",
            "groups_per_step": 1,
            "samples_per_group": 2,
            "update_interval": 1,
            "num_steps": 10,
            "weights_dir": "/nowhere",
            "stall_s": 60.0,
        }
        self.send(m.Welcome(**{**plain, **changes}), fds=[self.ring.segment.fd])

    def serve(
        self, records: Sequence[Handout], micro_batches: Sequence[Sequence[Part]], **changes: Any
    ) -> m.Next:
        """Hand a batch over."""
        request = self.receive(m.Next)
        self.send(batch(request, records, micro_batches, **changes))
        return request


class Hub:
    """Listens, and runs a script for the rank that connects; leaving the block waits for the script's end."""

    def __init__(
        self, directory: Path, script: Callable[[Line], None], *, welcome: bool = True, **changes: Any
    ) -> None:
        self.ring = Ring()
        self._script = script
        self._welcome = welcome
        self._changes = changes
        self._listener = listen(directory / "hub")
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def where(self) -> dict[str, str]:
        """Arguments of `TrainerHook.attach`."""
        return {"address": self._listener.address, "run": RUN, "token": TOKEN}

    def _run(self) -> None:
        try:
            with accept(self._listener) as channel:
                line = Line(channel, self.ring)
                if self._welcome:
                    line.let_in(**self._changes)
                self._script(line)
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(20)
        self._listener.close()
        self.ring.segment.close()
        if self._failure is not None:
            raise self._failure
        assert not self._thread.is_alive() or error is not None, "the hub's script did not end"


def accept(listener: Any) -> Channel:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            channel: Channel = listener.accept()
        except BlockingIOError:
            time.sleep(0.005)
        else:
            return channel
    raise TimeoutError("no rank connected")


# --- a hub in a process of its own ----------------------------------------------------------------------


@contextmanager
def hub_process(directory: Path, how: str) -> Iterator[tuple[dict[str, str], "subprocess.Popen[bytes]"]]:
    """A hub that behaves as `HABITS[how]`: arguments for `attach`, and its process."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(directory / "hub"), how], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        yield {"address": address, "run": RUN, "token": TOKEN}, process
    finally:
        process.kill()
        process.communicate()


def _serve_and_wait(line: Line) -> None:
    completions = [Completion(prompt=[1, 2], response=[3, 4, 5])]
    while True:
        message = m.decode(line.channel.receive(60))
        if isinstance(message, m.Next):
            line.send(batch(message, [line.ring.write(message.step, completions)], [[Part(0, 0)]]))
        elif isinstance(message, m.Goodbye):
            return


def _never_answer(line: Line) -> None:
    line.receive(m.Next, timeout_s=60)
    time.sleep(60)


def _never_answer_and_leave_a_child(line: Line) -> None:
    """The child holds the rank's socket open, as a forked worker of the hub would."""
    if os.fork() == 0:
        os.close(sys.stdout.fileno())  # the test reads it to its end
        time.sleep(4)
        os._exit(0)
    _never_answer(line)


HABITS = {
    "serve": _serve_and_wait,
    "never-answer": _never_answer,
    "never-answer-and-leave-a-child": _never_answer_and_leave_a_child,
}


def main(directory: str, how: str) -> None:
    with listen(directory) as listener:
        print(listener.address, flush=True)
        with accept(listener) as channel:
            line = Line(channel, Ring())
            line.let_in()
            HABITS[how](line)


if __name__ == "__main__":
    main(*sys.argv[1:])
