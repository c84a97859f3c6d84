"""A running evaluation: started, then collected part by part when the trainer asks.

Invariant: each prompt is delivered once; the next call continues an interrupted wait.
"""

from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from trainer_hook import messages as m
from trainer_hook.calls.evaluation import EvaluatedPrompt, Evaluation
from trainer_hook.errors import HookError
from trainer_hook.session.session import Session

_DECODER = msgspec.msgpack.Decoder(EvaluatedPrompt)


class PendingEvaluation:
    """An evaluation that runs alongside training; see `TrainerHook.begin_evaluation`.

    As a context manager, leaving the block before the end cancels it.
    """

    def __init__(self, session: Session, order: m.EvaluationOrder) -> None:
        self._session = session
        begun = session.ask_alone(lambda number: m.Evaluate(request=number, order=order), m.EvaluationBegun)
        self._number = begun.evaluation
        self._prompts: dict[int, EvaluatedPrompt] = {}
        self._request: int | None = None
        self._is_over = False
        self.num_prompts = 0
        """Total number of prompts; 0 until it is known."""

    @property
    def num_done(self) -> int:
        """Number of finished prompts."""
        return len(self._prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the evaluation if it is still running. Ignores a lost hub."""
        with suppress(HookError):
            self.cancel()

    def is_ready(self) -> bool:
        """Collect finished prompts without waiting. True if `result` would return or raise immediately."""
        if self._is_over:
            return True
        with self._session.call():
            connection = self._session.connection
            while not self._is_over and connection.has_arrived(self._ask()):
                self._take()
            return self._is_over

    def result(self) -> Evaluation:
        """Wait for all prompts.

        Raises:
            EvaluationFailed: the data set or the sampling parameters are invalid.
            Stalled: no prompt finished within `trainer.stall_s`; the call can be repeated.
        """
        while not self._is_over:
            with self._session.call():
                self._ask()
                self._take()
        return Evaluation(prompts=tuple(self._prompts[index] for index in sorted(self._prompts)))

    def cancel(self) -> None:
        """Abort its requests and discard its results. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._session.ask_alone(
                lambda number: m.CancelEvaluation(request=number, evaluation=self._number), m.Reply
            )

    def _ask(self) -> int:
        """Number of the pending request for the next part; sends it if there is none."""
        if self._request is None:
            self._request = self._session.connection.next_number()
            self._session.connection.begin(m.Collect(request=self._request, evaluation=self._number))
        return self._request

    def _take(self) -> None:
        connection, number = self._session.connection, self._ask()
        waits_for = f"{self._session.name} waits for an evaluation, {self.num_done} prompts finished"
        try:
            part: Any = connection.wait(number, timeout_s=self._session.wait_timeout_s, waits_for=waits_for)
        finally:
            if not connection.is_pending(number):
                self._request = None
        assert isinstance(part, m.EvaluationPart)
        for result in part.results:
            prompt = _DECODER.decode(result)
            self._prompts[prompt.index] = prompt
        self.num_prompts, self._is_over = part.num_prompts, part.is_over
