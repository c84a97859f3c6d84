"""Delivers batches, step by step.

Invariant: every delivered step ends in exactly one report: trained, or returned if its block raised. The next
call continues an interrupted request, so no step is lost between calls.
"""

import logging

from trainer_hook import messages as m
from trainer_hook.batches.batch import Batch
from trainer_hook.batches.group import Group, open_groups
from trainer_hook.errors import EndOfData
from trainer_hook.session.nodes import Nodes
from trainer_hook.session.session import Session
from trainer_hook.session.sharing import EngineSharing
from trainer_hook.session.stopwatch import Stopwatch

log = logging.getLogger("trainer_hook")


class Stepping:
    """This rank's progress through the steps."""

    def __init__(self, session: Session, *, step: int) -> None:
        self.step = step
        """The step that this rank is training or trains next."""
        self.num_trained = 0
        self.nodes: Nodes | None = None
        """Set in a job of several nodes."""
        self.sharing: EngineSharing | None = None
        """Set if the nodes share engines."""
        self.time = Stopwatch()
        self._session = session
        self._request: m.Next | None = None
        self._batch: Batch | None = None
        self._is_lent = False

    def is_ready(self) -> bool:
        """Request the step's batch unless requested before. True if `enter` would not wait."""
        self.end_lent()
        with self._session.call(outside=True):
            return self._session.connection.has_arrived(self._ask())

    def enter(self, *, copy: bool) -> Batch:
        """Wait for this rank's part of the step, and map it."""
        self.end_lent()
        with self._session.call(outside=True):
            with self.time.waiting():
                message = self._wait() if self.nodes is None else self._wait_for_all(self.nodes)
            self._batch = self._open(message, copy=copy)
            self._session.inside = f"the batch of step {message.step}"
            if message.num_tokens_global == 0:
                log.warning(
                    "batch_without_loss step=%d: no token is in the loss, so a mean over tokens is NaN",
                    message.step,
                )
            return self._batch

    def lend(self) -> Batch:
        """A batch without a `with` block: the step ends at this rank's next call that depends on it."""
        batch = self.enter(copy=True)
        self._session.inside, self._is_lent = None, True
        return batch

    def end_lent(self) -> None:
        """Mark a lent step as trained."""
        if self._is_lent:
            self.leave(None)

    def leave(self, error: BaseException | None) -> None:
        """End the step as trained or returned. Never raises: the next call reports a lost hub."""
        with self._session.leaving() as can_report:
            batch, self._batch, self._is_lent = self._batch, None, False
            if batch is None:
                return
            batch.close()
            if not can_report:
                return
            if error is None:
                self.step += 1
                self.num_trained += 1
            outcome = m.Outcome.TRAINED if error is None else m.Outcome.RETURNED
            self._report(batch.step, outcome)

    def _wait(self) -> m.Batch:
        connection = self._session.connection
        number = self._ask()
        try:
            answer = connection.wait(
                number, timeout_s=self._session.wait_timeout_s, waits_for=self._waits_for()
            )
        finally:
            if not connection.is_pending(number):
                self._request = None
        if isinstance(answer, m.Ended):
            raise EndOfData(answer.reason)
        assert isinstance(answer, m.Batch)
        return answer

    def _wait_for_all(self, nodes: Nodes) -> m.Batch:
        """This rank's part of a step that every node has; if one node has ended, all end."""
        if self.sharing is not None:
            self.sharing.settle()
        try:
            message = self._wait()
        except EndOfData:
            nodes.agree(None)
            raise
        agreed = None
        try:
            agreed = nodes.agree(message)
        finally:
            if agreed is None:
                self._give_back(message)
        if agreed is None:
            raise EndOfData("another node of the job has no more steps")
        return agreed

    def _ask(self) -> int:
        """Number of the pending request for this step; sends it if there is none."""
        if self._request is None:
            self._request = m.Next(request=self._session.connection.next_number(), step=self.step)
            self._session.connection.begin(self._request)
        return self._request.request

    def _open(self, message: m.Batch, *, copy: bool) -> Batch:
        """Map the batch; on failure return all of it."""
        groups: list[Group] = []
        try:
            groups = open_groups(
                self._session.reader, message.records, columns=self._session.columns, copy=copy
            )
            batch = Batch(message, groups, keep=copy)
        except BaseException:
            for group in groups:
                group.close()
            self._give_back(message)
            raise
        self._session.leases.add(message.step, groups)
        return batch

    def _give_back(self, message: m.Batch) -> None:
        sequences = [handout.sequence for handout in message.records]
        self._session.connection.post(
            m.Released(step=message.step, outcome=m.Outcome.RETURNED, sequences=sequences)
        )

    def _report(self, step: int, outcome: m.Outcome) -> None:
        sequences = self._session.leases.take_returned_of(step)
        self._session.connection.post(m.Released(step=step, outcome=outcome, sequences=sequences))
        self._session.report_returned()

    def _waits_for(self) -> str:
        num_held = self._session.leases.num_held
        held = f" and holds {num_held} records of earlier steps in tensors that it kept" if num_held else ""
        return f"{self._session.name} waits for step {self.step}{held}"
