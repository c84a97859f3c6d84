"""The engine: requests join and leave between steps; a step is schedule, run, postprocess.

Single-threaded: whoever owns it calls its methods one at a time. What became of requests is collected as
events. A weight update waits for the running requests, unless the engine is paused; while one waits,
nobody is admitted.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

import torch

from fa_rollout.engines.embedded.engine.scheduler import Limits, Scheduler
from fa_rollout.engines.embedded.errors import RefusedRequest
from fa_rollout.engines.embedded.model.request import FinishKind, FinishReason, GenerationRequest
from fa_rollout.engines.embedded.model.runner import Runner
from fa_rollout.engines.embedded.model.sampler import sample
from fa_rollout.engines.embedded.model.weights import CheckedWeights, ModelWeights

_NOT_FINITE = "The model's logits are not finite: its weights are broken."


class PauseMode(StrEnum):
    """What a pause does to the requests that it finds."""

    ABORT = "abort"
    RETRACT = "retract"
    """Back to the queue: their KV cache is computed anew, under the weights of that time."""
    IN_PLACE = "in_place"
    """They keep their KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """A request has `num_output` tokens to show."""

    request: GenerationRequest
    num_output: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What the engine holds and has done."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    num_waiting_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_steps: int
    num_weight_updates: int
    tokens_per_s: float
    """Over the last second or more of work."""
    is_paused: bool


class StepEngine:
    """Continuous batching over one model."""

    def __init__(self, runner: Runner, limits: Limits, *, weight_version: str) -> None:
        self.weight_version = weight_version
        self.pause_mode: PauseMode | None = None
        self._runner = runner
        self._weights = ModelWeights(runner.model)
        self._scheduler = Scheduler(limits)
        self._updates: deque[tuple[CheckedWeights, Future[int]]] = deque()
        self._events: list[EngineEvent] = []
        self._num_generated_tokens = 0
        self._tokens_per_s = 0.0
        self._window = (time.monotonic(), 0)
        self._num_finished = 0
        self._num_steps = 0
        self._num_weight_updates = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        if self.pause_mode is not None:
            return False
        return bool(self._scheduler.running or self._scheduler.waiting)

    def take_events(self) -> list[EngineEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- a step -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Prefill whoever can join, then decode one token for all that run."""
        scheduler = self._scheduler
        first_row = len(scheduler.running)
        newcomers = [] if self._updates else scheduler.admit()
        if newcomers:
            self._runner.cache.reserve(
                len(scheduler.running),
                scheduler.num_columns,
                used=(first_row, max((r.num_tokens for r in scheduler.running[:first_row]), default=0)),
            )
            logits_NV = self._runner.prefill(newcomers, first_row=first_row)
            self._postprocess(newcomers, logits_NV, first_row=first_row)
        if scheduler.running:
            self._postprocess(scheduler.running, self._runner.decode(scheduler.running), first_row=0)
        self._num_steps += 1
        self._measure()
        self._apply_updates()

    def _measure(self) -> None:
        now_s = time.monotonic()
        since_s, num_before = self._window
        if now_s - since_s >= 1.0:
            self._tokens_per_s = (self._num_generated_tokens - num_before) / (now_s - since_s)
            self._window = (now_s, self._num_generated_tokens)

    @torch.inference_mode()
    def _postprocess(
        self, requests: Sequence[GenerationRequest], logits_NV: torch.Tensor, *, first_row: int
    ) -> None:
        sampled = sample(logits_NV, requests)
        rows = []
        for index, request in enumerate(requests):
            if request.max_new_tokens == 0:
                request.finish = FinishReason(kind=FinishKind.LENGTH)
            elif sampled.are_finite or math.isfinite(sampled.logprobs[index]):
                request.accept(sampled.token_ids[index], sampled.logprobs[index])
                if request.num_top and sampled.top is not None:
                    request.output_top.append(sampled.top[index])
            else:
                request.finish = FinishReason(kind=FinishKind.ABORT, message=_NOT_FINITE, status_code=500)
                self._runner.cache.clear(first_row + index)
            if request.finish is not None:
                rows.append(first_row + index)
            elif request.stream:
                self._report(request)
        self._num_generated_tokens += len(requests)
        self._leave(rows)

    # -- requests ---------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests; while paused they are held at the door."""
        for request in requests:
            request.mark_version(self.weight_version)
            self._scheduler.waiting.append(request)

    def abort(self, is_meant: Callable[[GenerationRequest], bool]) -> None:
        """End the requests that are meant, wherever they are; what they have is their answer."""
        scheduler = self._scheduler
        for request in [request for request in scheduler.waiting if is_meant(request)]:
            scheduler.waiting.remove(request)
            request.finish = FinishReason(
                kind=FinishKind.ABORT, message="Abort in waiting queue", was_waiting=True
            )
            self._finish(request)
        rows = [row for row, request in enumerate(scheduler.running) if is_meant(request)]
        for row in rows:
            scheduler.running[row].finish = FinishReason(kind=FinishKind.ABORT, message="Aborted")
        self._leave(rows)
        self._apply_updates()

    def abort_all(self) -> None:
        self.abort(lambda _: True)

    def _leave(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._finish(self._scheduler.running[row])
        for move in self._scheduler.remove(rows):
            # The newest token is not in the cache yet
            self._runner.cache.move(move.source, move.target, move.request.num_tokens - 1)

    def _finish(self, request: GenerationRequest) -> None:
        request.finished_s = time.monotonic()
        self._num_finished += 1
        self._report(request)

    def _report(self, request: GenerationRequest) -> None:
        self._events.append(
            EngineEvent(
                request=request, num_output=len(request.output_ids), is_last=request.finish is not None
            )
        )

    # -- pause and weights ------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping; `mode` says what becomes of the requests that are there."""
        self.pause_mode = mode
        if mode is PauseMode.ABORT:
            self.abort_all()
        elif mode is PauseMode.RETRACT:
            for request in self._scheduler.running:
                request.num_retractions += 1
            self._scheduler.retract()
        self._apply_updates()

    def resume(self) -> None:
        self.pause_mode = None

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise WeightsRefused unless the model has such tensors; from any thread."""
        self._weights.check_shapes(shapes)

    @property
    def num_weight_bytes(self) -> int:
        return self._weights.num_bytes

    def known_weights(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those that the model has; raises WeightsRefused for other shapes. Any thread may call it."""
        return self._weights.known(tensors)

    def weight(self, name: str) -> torch.Tensor | None:
        """A parameter as it is now."""
        return self._weights.get(name)

    def update_weights(self, update: CheckedWeights, *, flush_cache: bool) -> "Future[int]":
        """Apply at once if paused or idle, else when the running requests have ended.

        The result is the number of requests that were held by a pause.
        """
        done: Future[int] = Future()
        if flush_cache and self.pause_mode is PauseMode.IN_PLACE and self._scheduler.running:
            done.set_exception(
                RefusedRequest(
                    f"flush_cache must be false while {len(self._scheduler.running)} requests are paused in "
                    f"place; pass false, or pause with mode retract. The weights were not changed."
                )
            )
            return done
        self._updates.append((update, done))
        self._apply_updates()
        return done

    def set_weight_version(self, version: str) -> None:
        """Rename the weights: tokens from here on carry the new version."""
        self.weight_version = version
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            request.mark_version(version)

    def flush_cache(self) -> bool:
        """Give the KV cache's memory back; False, as in SGLang, while some request holds a row."""
        if self._scheduler.running:
            return False
        self._runner.cache.release()
        return True

    def _apply_updates(self) -> None:
        while self._updates and (self.pause_mode is not None or not self._scheduler.running):
            update, done = self._updates.popleft()
            if not done.set_running_or_notify_cancel():
                continue  # who asked for it has hung up and would not learn of it
            self._weights.apply(update.tensors)
            self._num_weight_updates += 1
            if update.version is not None:
                self.set_weight_version(update.version)
            num_paused = len(self._scheduler.running) + len(self._scheduler.waiting)
            done.set_result(num_paused if self.pause_mode is not None else 0)

    def statistics(self) -> EngineStatistics:
        """A snapshot; any thread may take one."""
        running, waiting = list(self._scheduler.running), list(self._scheduler.waiting)
        return EngineStatistics(
            num_running=len(running),
            num_waiting=len(waiting),
            num_used_tokens=sum(request.num_tokens for request in running),
            num_waiting_tokens=sum(request.num_tokens for request in waiting),
            num_generated_tokens=self._num_generated_tokens,
            num_finished=self._num_finished,
            num_steps=self._num_steps,
            num_weight_updates=self._num_weight_updates,
            tokens_per_s=self._tokens_per_s,
            is_paused=self.pause_mode is not None,
        )
