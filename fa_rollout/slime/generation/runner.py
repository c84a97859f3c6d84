"""One group from slime's samples to a record: slime's own functions, run to the end.

| what happens to a group | what follows |
|---|---|
| a sample is aborted (custom generate functions) | it is continued or restarted, by `--partial-rollout` |
| a sample has tokens of an unknown weight version | it is restarted |
| a function raises | the run ends with the traceback, or the group is retried: `fa_rollout_on_error` |
| a function exceeds its time limit | failed, with the line that it is on |
| the dynamic filter drops it | filtered |
| all samples are done | a record |

Invariant: a group ends whole, and no exception is dropped.
"""

import asyncio
import functools
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fa_rollout.client.base.errors import ClientError, EngineUnavailable
from fa_rollout.config import ConfigError
from fa_rollout.filters import EndlessRejection, FilterOutcome, RejectionBound, Verdict
from fa_rollout.generator.base.error_text import tellable
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.base.tasks import first_error
from fa_rollout.generator.records.outbox import Outbox
from fa_rollout.generator.rollouts.execution import Slot
from fa_rollout.generator.turns.job import GroupEnding, Job
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.slime.generation.fast import EarlyStart
from fa_rollout.slime.generation.group_context import GROUP_CONTEXT, GroupContext
from fa_rollout.slime.generation.record import oldest_version, slime_record
from fa_rollout.slime.generation.transport import PostFailed
from fa_rollout.slime.options import Options
from fa_rollout.slime.upstream import Upstream
from fa_rollout.slime.wire import decode_prompt, encode_rest, flatten
from fa_rollout.user_code.call import run as run_user_code
from fa_rollout.user_code.deadline import Deadline
from fa_rollout.user_code.failure import UserCodeFailed, UserCodeTimedOut, told
from trainer_hook.messages import Assignment, Message, Settled, Settlement, Warned
from trainer_hook.record import UNKNOWN_VERSION

logger = logging.getLogger(__name__)

MAX_ROUNDS = 64
"""How often the aborted samples of a group are sampled again."""
_BACKOFF_S, _BACKOFF_CAP_S = 0.05, 2.0


class GroupRaised(ConfigError):
    """User code or slime's code raised in a group. The text has its traceback."""


class NoProgress(RuntimeError):
    """The samples of a group were aborted again and again."""


class SlimeRunner:
    """Runs groups."""

    def __init__(
        self,
        *,
        args: Any,
        options: Options,
        directory: str,
        slime: "asyncio.Future[Upstream]",
        outbox: Outbox,
        send: Callable[[Message], None],
        depart: Callable[[Job], None],
        book: VersionBook,
        num_candidates: Callable[[], int],
        early: EarlyStart | None,
        rejections: RejectionBound,
        idle_s: float,
    ) -> None:
        """
        Args:
            slime: done when slime is imported and set up.
            book: what engines hold now.
            num_candidates: groups that this generator holds.
            early: starts plain groups before slime is imported.
            rejections: ends a run whose filter drops everything.
            idle_s: longest time that a group's functions may run without a request to an engine.
        """
        self._idle_s = idle_s
        self._args = args
        self._options = options
        self._directory = directory
        self._slime = slime
        self._outbox = outbox
        self._send = send
        self._depart = depart
        self._book = book
        self._num_candidates = num_candidates
        self._early = early
        self._rejections = rejections
        self._prompts: dict[int, bytes] = {}
        self.num_restarts = 0
        """Samples of custom generate functions that came back aborted and began anew."""
        self.num_samples = 0

    def stock(self, groups: Sequence[Assignment], payloads: Sequence[bytes]) -> None:
        """Store the payloads that were fed for these groups."""
        self._prompts.update(zip((a.group for a in groups), payloads, strict=True))

    async def run(
        self, job: Job, slot: Slot, deadline: AbstractAsyncContextManager[None]
    ) -> GroupEnding | None:
        """Run a group; None if it was committed, or filtered and reported.

        Raises:
            GroupRaised: a function raised, and the run must end.
            EndlessRejection: the filter has dropped too many groups in a row.
            EngineUnavailable: no engine answers.
        """
        payload = self._prompts.pop(job.assignment.group)
        try:
            async with deadline:
                await self._carry(job, slot, payload)
        except (EndlessRejection, EngineUnavailable):
            raise
        except UserCodeTimedOut as error:
            return GroupEnding(outcome=Settlement.FAILED, reason=str(error))
        except Exception as error:  # slime's mistakes and ours too; see the table above
            return self._raised(job, error)
        return None

    async def _carry(self, job: Job, slot: Slot, payload: bytes) -> None:
        started_s = time.monotonic()
        ids, pickled = decode_prompt(payload)
        context = GroupContext(
            job=job,
            slot=lambda: slot(job),
            depart=self._depart,
            prompt_ids=ids,
            book=self._book,
            started_version=self._book.published,
            deadline=self._deadline(),
        )
        GROUP_CONTEXT.set(context)
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                early = self._begin(context, tasks)
                slime = await asyncio.shield(self._slime)
                group = await self._roll_out(slime, pickled, context, early)
        self.num_samples += len(group)
        if await run_user_code("filter", lambda: self._drops(slime, job, group), passes=(EndlessRejection,)):
            return
        record = slime_record(
            group,
            context,
            self._args,
            rest=encode_rest(group, self._directory),
            started_s=started_s,
            finished_s=time.monotonic(),
        )
        await self._outbox.put(record)

    def _begin(self, context: GroupContext, tasks: asyncio.TaskGroup) -> list["asyncio.Task[Turn]"]:
        """Turns of all samples, begun at once, while slime is not there yet and is not needed for them."""
        if self._early is None or self._slime.done() or not len(context.prompt_ids):
            return []
        return [
            tasks.create_task(self._early.turn(context, member))
            for member in range(self._args.n_samples_per_prompt)
        ]

    async def _roll_out(
        self, slime: Upstream, pickled: bytes, context: GroupContext, early: Sequence["asyncio.Task[Turn]"]
    ) -> list[Any]:
        """All members done: slime's own way through generate, hooks and rewards, as often as it takes."""
        group: list[Any] = pickle.loads(pickled)
        context.prompt = group[0].prompt
        context.begun = {id(sample): turn for sample, turn in zip(group, early, strict=False)}
        run = slime.sglang_rollout.generate_and_rm_group
        for round_number in range(MAX_ROUNDS):
            state = slime.sglang_rollout.GenerateState(self._args)
            params = state.sampling_params.copy()
            with self._calling(context):
                made = await run_user_code(
                    "slime",
                    functools.partial(run, self._args, group, params, evaluation=False),
                    deadline=context.deadline,
                    passes=(SampleFailed, ClientError, PostFailed),
                )
            group = self._whole(made)
            aborted = [member for member, made in enumerate(group) if _is_aborted(slime, made)]
            lost = [member for member, made in enumerate(group) if _is_of_unknown_version(context, made)]
            if not aborted and not lost:
                return group
            self._renew(group, aborted, lost, pickled)
            await asyncio.sleep(min(_BACKOFF_CAP_S, _BACKOFF_S * 2**round_number))
        raise NoProgress(
            f"the samples of a group were aborted {MAX_ROUNDS} times: answers take longer than the time "
            "between weight updates; set --partial-rollout to continue them after an update"
        )

    def _calling(self, context: GroupContext) -> AbstractContextManager[None]:
        """A generate function of the user's may find no end; slime's own asks once."""
        is_own = self._args.custom_generate_function_path is not None
        return context.job.calling(context.deadline) if is_own else nullcontext()

    def _deadline(self) -> Deadline:
        rule = f"it asked no engine for {self._idle_s:g} s (fa_rollout_idle_timeout_s)"
        return Deadline(self._idle_s, rule)

    def _whole(self, made: Any) -> list[Any]:
        """What slime made of a group, if that is as many samples as it was to make."""
        number = self._args.n_samples_per_prompt
        if not isinstance(made, list) or len(made) != number:
            found = len(made) if isinstance(made, list) else type(made).__name__
            raise UserCodeFailed(f"slime: a group must have {number} samples, found {found}")
        return made

    def _renew(self, group: list[Any], aborted: list[int], lost: list[int], pickled: bytes) -> None:
        """Prepare the aborted members for the next round; without `--partial-rollout` they start anew."""
        fresh = pickle.loads(pickled)
        for member in aborted:
            if isinstance(group[member], list) or not self._args.partial_rollout:
                group[member] = fresh[member]
                self.num_restarts += 1
        for member in lost:
            group[member] = fresh[member]

    def _drops(self, slime: Upstream, job: Job, group: list[Any]) -> bool:
        """Call the dynamic filter; a dropped group is settled here, with its samples if a hook needs them."""
        path = self._args.dynamic_sampling_filter_path
        if path is None:
            return False
        verdict = slime.filters.call_dynamic_filter(slime.load_function(path), self._args, group)
        drops = slime.filters.should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=self._num_candidates(),
            target_data_size=self._args.rollout_batch_size,
        )
        outcome = FilterOutcome.REJECTED if drops else FilterOutcome.KEPT
        self._rejections.record(Verdict(outcome=outcome, reason=verdict.reason or "no reason given"))
        if not drops:
            return False
        wants_all = self._args.rollout_all_samples_process_path is not None
        self._send(
            Settled(
                group=job.assignment.group,
                attempt=job.assignment.attempt,
                outcome=Settlement.FILTERED,
                reason=verdict.reason or "",
                mean_response_len=float(np.mean([s.response_length for s in flatten(group)])),
                payload=pickle.dumps(group, pickle.HIGHEST_PROTOCOL) if wants_all else b"",
            )
        )
        return True

    def _raised(self, job: Job, error: Exception) -> GroupEnding:
        attempt = job.assignment.attempt + 1
        text = tellable(told(error)) if not isinstance(error, UserCodeFailed) else tellable(str(error))
        if self._options.on_error == "raise" or attempt >= self._options.max_attempts:
            raise GroupRaised(
                f"group {job.assignment.group}, attempt {attempt} of {self._options.max_attempts}, raised "
                f"(with fa_rollout_on_error = retry a group starts again):\n{text}"
            ) from error
        self._send(
            Warned(text=f"retrying group {job.assignment.group} after attempt {attempt} failed: {text}")
        )
        return GroupEnding(outcome=Settlement.RETURNED, reason=text)


def _is_of_unknown_version(context: GroupContext, made: Any) -> bool:
    return any(oldest_version(sample, context) == UNKNOWN_VERSION for sample in flatten([made]))


def _is_aborted(slime: Upstream, made: Any) -> bool:
    aborted = slime.Sample.Status.ABORTED
    return any(sample.status == aborted for sample in (made if isinstance(made, list) else (made,)))
