"""The scripted engine without HTTP: queue, decoding, pauses, aborts and versions, as SGLang has them.

A request is at the door (held there by a pause or a writer), waiting, running, or over. Each ends in exactly
one call of `deliver`. Times come from the event loop; nothing here blocks, and nothing runs per token.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from fa_rollout.simulation.decoder import Decoder
from tests.kit.scripted import render
from tests.kit.scripted.job import Job
from tests.kit.scripted.script import Script

_QUEUE_CUT = 50
"""SGLang reports the output of an unstreamed request in steps of this many tokens."""

Finish = dict[str, Any]


class Core:
    """The state of one engine."""

    def __init__(self, script: Script, deliver: Callable[[Job, Finish, int, bool], None]) -> None:
        self.script = script
        self._deliver = deliver
        """Called with job, finish reason, tokens made, and whether it was aborted in the queue."""
        self.label = script.weight_version
        self.pause_mode: str | None = None
        self.decoder: Decoder[Job] = Decoder(script.tokens_per_s, script.total_tokens_per_s)
        self.running: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.door: list[Job] = []
        self.known: dict[str, Job] = {}
        """By id; includes those at the door."""
        self._lengths: Counter[int] = Counter()
        self._writers: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, script: Script) -> None:
        """Another speed and other limits from now on."""
        self.script = script
        self.decoder.advance(time.monotonic())
        self.decoder.tokens_per_s = script.tokens_per_s
        self.decoder.total_tokens_per_s = script.total_tokens_per_s
        self._rearm()

    # Requests.

    def submit(self, job: Job) -> None:
        """A request comes in."""
        self.known[job.rid] = job
        self._lengths[len(job.rid)] += 1
        if self.pause_mode is not None or self._writers:
            self.door.append(job)
        else:
            self.waiting.append(job)
            self._schedule()

    @property
    def is_queue_full(self) -> bool:
        """True when a new request gets 503."""
        limit = self.script.max_queued
        return (
            limit is not None and len(self.waiting) >= limit and len(self.running) >= self.script.max_running
        )

    def made(self, job: Job) -> int:
        """Tokens that a request has made by now."""
        self.decoder.advance(time.monotonic())
        return self.decoder.made(job)

    def spans(self, job: Job, num_tokens: int) -> list[tuple[str, int]]:
        """The version spans of a request that has made so many tokens."""
        last = job.spans[-1][1] if job.spans else 0
        return [*job.spans, (self.label, num_tokens)] if num_tokens > last else list(job.spans)

    def _schedule(self) -> None:
        now = time.monotonic()
        self.decoder.advance(now)
        while self.waiting and self.pause_mode is None and len(self.running) < self.script.max_running:
            job = self.waiting.popleft()
            job.is_running = True
            self.running[job.rid] = job
            if self.script.prefill_s > 0:
                asyncio.get_running_loop().call_later(self.script.prefill_s, self._begin, job)
            else:
                self._begin(job)
        self._rearm()

    def _begin(self, job: Job) -> None:
        if job.is_over or not job.is_running:
            return
        self.decoder.advance(time.monotonic())
        if self.script.tokens_per_s <= 0 and self.script.total_tokens_per_s <= 0:
            job.made_before = job.length
            self._finish(job, job.finish)
        else:
            self.decoder.join(job)
            self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay_s = self.decoder.next_finish_s()
        if delay_s is not None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self.decoder.advance(time.monotonic())
        for job in self.decoder.finished():
            self._finish(job, job.finish)
        self._schedule()

    def _finish(self, job: Job, finish: Finish, *, in_queue: bool = False, extra_tokens: int = 0) -> None:
        num_tokens = min(job.length, self.decoder.made(job) + extra_tokens)
        self.decoder.leave(job)
        job.is_over, job.is_running = True, False
        self.running.pop(job.rid, None)
        self._forget(job)
        if in_queue and not job.is_streamed:
            num_tokens -= num_tokens % _QUEUE_CUT
        self._deliver(job, finish, num_tokens, in_queue)
        self._admit_writers()

    def _forget(self, job: Job) -> None:
        if self.known.pop(job.rid, None) is not None:
            self._lengths[len(job.rid)] -= 1
            if not self._lengths[len(job.rid)]:
                del self._lengths[len(job.rid)]

    # Aborts.

    def abort(self, rid: str) -> None:
        """By exact id, if known, and then by prefix; at the door an abort is lost."""
        known = self.known.get(rid)
        if known is None or (known.is_abort_sent and self.script.protocol == "0.5.23"):
            return
        known.is_abort_sent = True
        if len(self._lengths) == 1:
            self._abort(known)
        else:
            for job in [job for other, job in self.known.items() if other.startswith(rid)]:
                self._abort(job)
        self._schedule()

    def abort_all(self) -> None:
        """Every request but those at the door."""
        for job in [*self.running.values(), *self.waiting]:
            self._abort(job)
        self._schedule()

    def _abort(self, job: Job) -> None:
        self.decoder.advance(time.monotonic())
        if job.is_running and self.pause_mode == "in_place":
            job.is_abort_pending = True
        elif job.is_running:
            self._finish(job, _ABORTED, extra_tokens=1)
        elif job in self.waiting:
            self.waiting.remove(job)
            self._finish(job, _ABORTED_WAITING, in_queue=True)

    def disconnect(self, job: Job) -> None:
        """The client of a request went away: it ends, later."""
        asyncio.get_running_loop().call_later(self.script.disconnect_abort_s, self._abandon, job)

    def _abandon(self, job: Job) -> None:
        if job in self.door:
            self.door.remove(job)
            self._forget(job)
        elif not job.is_over:
            self._abort(job)
            self._schedule()

    # Pauses.

    def pause(self, mode: str) -> None:
        """Stand still; new requests are held at the door."""
        self.decoder.advance(time.monotonic())
        if mode == "abort":
            self.abort_all()
        self.pause_mode = mode
        if mode == "retract":
            for job in reversed(self.running.values()):
                self.decoder.leave(job)
                job.is_running = False
                job.num_retractions += 1
                self.waiting.appendleft(job)
            self.running.clear()
        self.decoder.freeze()
        self._rearm()

    def go_on(self) -> None:
        """Run again; pending aborts first, then the door opens."""
        self.decoder.advance(time.monotonic())
        self.decoder.thaw()
        self.pause_mode = None
        for job in [job for job in self.running.values() if job.is_abort_pending]:
            self._finish(job, _ABORTED, extra_tokens=1)
        self._open_door()

    def _open_door(self) -> None:
        door, self.door = self.door, []
        self.waiting.extend(job for job in door if not job.is_over)
        self._schedule()

    # Weights.

    def when_free(self, work: Callable[[], None]) -> None:
        """Do `work` at once while paused, else when no request is left; new ones wait at the door."""
        if self.pause_mode is not None or (not self.running and not self.waiting):
            work()
        else:
            self._writers.append(work)

    def _admit_writers(self) -> None:
        if self._writers and not self.running and not self.waiting:
            writers, self._writers = self._writers, []
            for work in writers:
                work()
            self._open_door()

    def set_label(self, label: str) -> None:
        """Tokens from now on are sampled by this version."""
        self.decoder.advance(time.monotonic())
        for job in [*self.running.values(), *self.waiting]:
            made = self.decoder.made(job)
            if made and (not job.spans or job.spans[-1][1] < made):
                job.spans.append((self.label, made))
        self.label = label
        render.warm(self.script.vocab_size, label)


_ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_ABORTED_WAITING: Finish = {
    "type": "abort",
    "message": "Abort in waiting queue",
    "status_code": None,
    "err_type": None,
}
