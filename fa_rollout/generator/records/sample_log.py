"""What the generator wrote, kept for people: each group at its end, with why it ended so.

In: jobs and their samples. Out: files of `records.sample_file` in the run's folder, the oldest of which go
when all of them pass the bound. Invariant: the event loop only encodes; a thread writes once a second. A disk
that is full ends the log with one warning, and the run goes on.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fa_rollout.config import Run
from fa_rollout.generator.base.frames import Chunk, Frames
from fa_rollout.generator.turns.job import GroupEnding, Job
from fa_rollout.process.own_threads import in_thread
from fa_rollout.process.private_files import append_private, make_private
from fa_rollout.records.sample_file import FOLDER, MAGIC, FileName, WrittenGroup
from fa_rollout.sample import Sample
from fa_rollout.user_code.failure import in_one_line
from trainer_hook.messages import Settlement

FLUSH_S = 1.0
MAX_BUFFERED_BYTES = 64 << 20
"""A disk that hangs costs samples, not memory."""
MAX_LABEL_BYTES = 4096
"""Longer labels, such as whole test suites, are cut."""
_FILES_PER_LOG = 16
_MAX_FILE_BYTES = 64 << 20
_I4, _U1 = np.dtype("<i4"), np.dtype("u1")


class SampleLog:
    """The log of one life of the generator; of none where the run keeps none."""

    def __init__(self, run: Run, *, name: str, incarnation: int, warn: Callable[[str], None]) -> None:
        """
        Args:
            name: of the run.
            warn: takes why the log ended early; called in the event loop's thread.
        """
        self._is_open = run.output_dir is not None and bool(run.samples) and run.samples != "off"
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._frames = Frames(self._encoder)
        self._warn = warn
        limit_bytes = 0 if isinstance(run.samples, str) else run.samples
        self._files = _Files(Path(run.output_dir or "", FOLDER), limit_bytes, name, incarnation)
        self._num_lost = 0
        """Groups that found the buffer full."""

    def write(self, job: Job, outcome: str, samples: Sequence[Sample] = (), reason: str = "") -> None:
        """Note the end of a group's attempt. Never fails, whatever user code put into a sample."""
        if not self._is_open:
            return
        if self._frames.num_bytes > MAX_BUFFERED_BYTES:
            if not self._num_lost:
                self._warn("the sample log leaves groups out: its disk is slower than the run")
            self._num_lost += 1
            return
        try:
            self._frames.add(self._written(job, outcome, samples, reason))
        except Exception as error:  # objects of the user's own fail in their own ways
            said = f"{reason}; its samples cannot be kept: {in_one_line(error)}"
            self._frames.add(self._written(job, outcome, (), said, has_label=False))

    def ended(self, job: Job, ending: GroupEnding) -> None:
        """Note a group that became no record; one that is given back will be tried again."""
        if ending.outcome is not Settlement.RETURNED:
            self.write(job, ending.outcome, ending.samples, ending.reason)

    async def run(self) -> None:
        """Give what came to the disk once a second, until cancelled; then the rest."""
        try:
            while self._is_open:
                await asyncio.sleep(FLUSH_S)
                chunks = self._frames.take()
                await in_thread(self._files.append, chunks)
                self._frames.reuse(chunks)
                self._look()
        finally:
            self.close()

    def close(self) -> None:
        """Write what is left, and no more."""
        if self._is_open:
            self._files.append(self._frames.take())
            self._files.close()
            self._look()
            self._is_open = False

    # --- inside -----------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._files.failure is not None and self._is_open:
            self._is_open = False
            self._frames.take()
            self._files.close()
            self._warn(f"the sample log ends here: {self._files.failure}")

    def _written(
        self, job: Job, outcome: str, samples: Sequence[Sample], reason: str, *, has_label: bool = True
    ) -> WrittenGroup:
        assignment = job.assignment
        prompt_ids = job.prompt_ids
        is_own = not all([sample.prompt_ids is prompt_ids for sample in samples])  # noqa: C419, faster
        mask = _joined([sample.loss_mask for sample in samples], _U1).tobytes()
        return WrittenGroup(
            group=assignment.group,
            attempt=assignment.attempt,
            epoch=assignment.epoch,
            prompt_index=assignment.prompt_index,
            outcome=outcome,
            reason=reason,
            started_s=job.started_s,
            ended_s=time.monotonic(),
            label=self._label(job.label) if has_label else None,
            prompt_ids=b"" if prompt_ids is None else _bytes(prompt_ids),
            own_prompt_ids=[_bytes(sample.prompt_ids) for sample in samples] if is_own else [],
            members=[sample.member for sample in samples],
            response_lens=[len(sample.response_ids) for sample in samples],
            response_ids=_joined([sample.response_ids for sample in samples], _I4).data,  # type: ignore[arg-type]
            loss_mask=b"" if b"\0" not in mask else mask,
            version_spans=[sample.version_spans for sample in samples],  # type: ignore[misc]
            rewards=[sample.reward for sample in samples],
            reward_parts=[sample.reward_parts for sample in samples],
            finish_reasons=[sample.finish_reason for sample in samples],
        )

    def _label(self, label: Any) -> Any:
        if label is None or type(label) in (int, float, bool):
            return label
        text = self._encoder.encode(label)
        return msgspec.Raw(text) if len(text) <= MAX_LABEL_BYTES else f"{label!s:.{MAX_LABEL_BYTES}}"


class _Files:
    """Numbered files of one life; the only methods that run in another thread."""

    def __init__(self, folder: Path, limit_bytes: int, name: str, incarnation: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._file_bytes = min(_MAX_FILE_BYTES, limit_bytes // _FILES_PER_LOG)
        self._name, self._incarnation, self._number = name, incarnation, 0
        self._file: Any = None
        self._lock = threading.Lock()
        self.failure: str | None = None

    def append(self, chunks: list[Chunk]) -> None:
        """Write whole frames; a failure is kept in `failure`, and nothing is written after it."""
        with self._lock:
            if self.failure is not None:
                return
            try:
                for chunk in chunks:
                    self._write(chunk.frames)
            except (OSError, ValueError) as error:  # a path may hold what no path can
                why = getattr(error, "strerror", None) or error
                self.failure = f"{self._folder} cannot be written: {why}"

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, frames: memoryview) -> None:
        if self._file is None or self._file.tell() >= self._file_bytes:
            self._begin(len(frames))
        while frames:
            frames = frames[self._file.write(frames) :]

    def _begin(self, num_bytes: int) -> None:
        if self._file is not None:
            self._file.close()
        make_private(self._folder)
        self._make_room(max(self._file_bytes, num_bytes))
        self._number += 1
        name = FileName(run=self._name, incarnation=self._incarnation, number=self._number)
        self._file = append_private(self._folder / str(name))
        self._file.write(MAGIC)

    def _make_room(self, num_bytes: int) -> None:
        """The oldest files go, of earlier runs in this folder too."""
        found = [(path.stat().st_mtime_ns, path) for path in self._folder.glob("*.msgpack")]
        total = sum(path.stat().st_size for _, path in found)
        for _, path in sorted(found):
            if total + num_bytes <= self._limit_bytes:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


def _bytes(ids: Any) -> bytes:
    data: bytes = np.asarray(ids, _I4).tobytes()
    return data


def _joined(arrays: "list[npt.NDArray[Any]]", dtype: "np.dtype[Any]") -> "npt.NDArray[Any]":
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return repr(value)
