"""Evaluations: which rank asked for which, what each has brought, who waits for more.

In: orders of ranks, results of the generator. Out: orders to the generator, parts to ranks that ask.

| who | waits for | unblocked by |
|---|---|---|
| a rank that collects | a further prompt, or the end | `EvaluationPart`, `Refused` |

Invariant: each prompt of an evaluation is handed to its rank once, whatever lives the generator has; an
evaluation ends by its end, by an error, or with its rank. Nothing of it touches the books of training.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fa_rollout.account import events
from fa_rollout.account.events import Note
from fa_rollout.hub.state.world import Attachment
from trainer_hook import messages as m

PART_BYTES = 4 << 20
"""Results of one part, the last one aside: a rank that reads slowly is never sent all at once."""


@dataclass(slots=True, kw_only=True)
class _Evaluation:
    number: int
    rank: Attachment
    order: m.EvaluationOrder
    results: deque[bytes] = field(default_factory=deque)
    """Not collected yet."""
    done: set[int] = field(default_factory=set)
    num_prompts: int = 0
    is_over: bool = False
    error: str | None = None
    collecting: int | None = None
    """The rank's request that waits for more."""


class Evaluations:
    """All evaluations whose ranks are here."""

    def __init__(
        self,
        *,
        note: Note = lambda event: None,
        to_rank: Callable[[Attachment, m.Message], None],
        to_generator: Callable[[m.Message], None],
    ) -> None:
        self._note = note
        self._to_rank = to_rank
        self._to_generator = to_generator
        self._open: dict[int, _Evaluation] = {}
        self._last = 0
        self._generator_is_up = False

    # --- what ranks ask ---------------------------------------------------------------------------

    def begin(self, rank: Attachment, message: m.Evaluate) -> None:
        """A rank wants an evaluation; one without a generator begins with the next."""
        self._last += 1
        evaluation = _Evaluation(number=self._last, rank=rank, order=message.order)
        self._open[self._last] = evaluation
        self._note(
            events.EvaluationBegan(number=self._last, rank=rank.hello.dp_rank, dataset=message.order.dataset)
        )
        self._to_rank(rank, m.EvaluationBegun(request=message.request, evaluation=self._last))
        self._order(evaluation)

    def collect(self, rank: Attachment, message: m.Collect) -> None:
        """A rank asks for what has come."""
        evaluation = self._open.get(message.evaluation)
        if evaluation is None or evaluation.rank is not rank:
            text = f"this rank has no evaluation {message.evaluation}, or has collected it"
            self._to_rank(rank, m.Refused(request=message.request, error="HookStateError", text=text))
            return
        evaluation.collecting = message.request
        self._answer(evaluation)

    def cancel(self, rank: Attachment, message: m.CancelEvaluation) -> None:
        """A rank does not want it any more."""
        evaluation = self._open.get(message.evaluation)
        if evaluation is not None and evaluation.rank is rank:
            self._forget(evaluation)
        self._to_rank(rank, m.Reply(request=message.request))

    def left(self, rank: Attachment) -> None:
        """A rank is gone, and with it who would collect."""
        for evaluation in list(self._open.values()):
            if evaluation.rank is rank:
                self._forget(evaluation)

    def stop(self, reason: str) -> None:
        """The run ends: what is under way will not be finished."""
        for evaluation in list(self._open.values()):
            if not evaluation.is_over:
                self._end(evaluation, f"the run was stopped: {reason}")

    # --- the generator's news ---------------------------------------------------------------------

    def generator_is_up(self) -> None:
        """A generator begins; it gets what the last one did not finish."""
        self._generator_is_up = True
        for evaluation in self._open.values():
            self._order(evaluation)

    def generator_is_gone(self) -> None:
        """The generator's life ended."""
        self._generator_is_up = False

    def evaluated(self, message: m.Evaluated) -> None:
        """A prompt is answered for; one that nobody waits for, or that came before, is dropped."""
        evaluation = self._open.get(message.evaluation)
        if evaluation is None or evaluation.is_over or message.index in evaluation.done:
            return
        evaluation.done.add(message.index)
        evaluation.num_prompts = message.num_prompts
        evaluation.results.append(message.result)
        self._answer(evaluation)

    def ended(self, message: m.EvaluationEnded) -> None:
        """No result follows."""
        evaluation = self._open.get(message.evaluation)
        if evaluation is None or evaluation.is_over:
            return
        error, num_done = message.error, len(evaluation.done)
        if error is None and num_done < evaluation.num_prompts:
            error = f"an evaluation must answer every prompt: {num_done} of {evaluation.num_prompts} were"
        self._end(evaluation, error)

    # --- inside -----------------------------------------------------------------------------------

    def _order(self, evaluation: _Evaluation) -> None:
        if self._generator_is_up and not evaluation.is_over:
            self._to_generator(
                m.RunEvaluation(
                    evaluation=evaluation.number, order=evaluation.order, done=sorted(evaluation.done)
                )
            )

    def _end(self, evaluation: _Evaluation, error: str | None) -> None:
        evaluation.is_over, evaluation.error = True, error
        self._note_end(evaluation, error)
        self._answer(evaluation)

    def _answer(self, evaluation: _Evaluation) -> None:
        """Answer the rank that collects, if there is something to say."""
        request = evaluation.collecting
        if request is None or not (evaluation.results or evaluation.is_over):
            return
        evaluation.collecting = None
        if evaluation.error is not None:
            del self._open[evaluation.number]
            refusal = m.Refused(request=request, error="EvaluationFailed", text=evaluation.error)
            self._to_rank(evaluation.rank, refusal)
            return
        results = _take(evaluation.results)
        is_last = evaluation.is_over and not evaluation.results
        if is_last:
            del self._open[evaluation.number]
        self._to_rank(
            evaluation.rank,
            m.EvaluationPart(
                request=request, results=results, num_prompts=evaluation.num_prompts, is_over=is_last
            ),
        )

    def _forget(self, evaluation: _Evaluation) -> None:
        del self._open[evaluation.number]
        if evaluation.is_over:
            return
        self._note_end(evaluation, "nobody waits for it any more")
        if self._generator_is_up:
            self._to_generator(m.DropEvaluation(evaluation=evaluation.number))

    def _note_end(self, evaluation: _Evaluation, error: str | None) -> None:
        number, prompts = evaluation.number, len(evaluation.done)
        self._note(events.EvaluationFinished(number=number, prompts=prompts, error=error))


def _take(results: deque[bytes]) -> list[bytes]:
    taken: list[bytes] = []
    num_bytes = 0
    while results and num_bytes < PART_BYTES:
        taken.append(results.popleft())
        num_bytes += len(taken[-1])
    return taken
