"""An evaluation on its way: begun, then collected part by part when the trainer has time for it.

Invariant: each prompt comes once; a wait that was interrupted is taken up by the next call.
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
    """An evaluation that runs beside training; see `TrainerHook.begin_evaluation`.

    As a context manager it is cancelled by leaving the block early.
    """

    def __init__(self, session: Session, order: m.EvaluationOrder) -> None:
        self._session = session
        begun = session.ask_alone(lambda number: m.Evaluate(request=number, order=order), m.EvaluationBegun)
        self._number = begun.evaluation
        self._prompts: dict[int, EvaluatedPrompt] = {}
        self._request: int | None = None
        self._is_over = False
        self.num_prompts = 0
        """In all; 0 while that is unknown."""

    @property
    def num_done(self) -> int:
        """Prompts that have come."""
        return len(self._prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaving the block before it is over cancels it, where there still is a hub to tell."""
        with suppress(HookError):
            self.cancel()

    def is_ready(self) -> bool:
        """Take what has come, without waiting; whether `result` would return, or raise, at once."""
        if self._is_over:
            return True
        with self._session.call():
            connection = self._session.connection
            while not self._is_over and connection.has_arrived(self._ask()):
                self._take()
            return self._is_over

    def result(self) -> Evaluation:
        """Wait for all of it.

        Raises:
            EvaluationFailed: the data set or the sampling cannot be used.
            Stalled: no prompt ended in `trainer.stall_s`; the call may be made again.
        """
        while not self._is_over:
            with self._session.call():
                self._ask()
                self._take()
        return Evaluation(prompts=tuple(self._prompts[index] for index in sorted(self._prompts)))

    def cancel(self) -> None:
        """End it: its requests are aborted, and what it brought is forgotten. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._session.ask_alone(
                lambda number: m.CancelEvaluation(request=number, evaluation=self._number), m.Reply
            )

    def _ask(self) -> int:
        """Number of the request for the next part, sent now or before."""
        if self._request is None:
            self._request = self._session.connection.next_number()
            self._session.connection.begin(m.Collect(request=self._request, evaluation=self._number))
        return self._request

    def _take(self) -> None:
        connection, number = self._session.connection, self._ask()
        waits_for = f"{self._session.name} waits for an evaluation, {self.num_done} of its prompts came"
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
