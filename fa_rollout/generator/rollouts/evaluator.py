"""Evaluations beside training: prompts in, scored samples out, one answer a prompt.

| a prompt waits for | released by |
|---|---|
| a place among the samples of evaluations, of which they have their own number | a sample that ends |
| engines that stand still for an update | `updates`; its samples are of mixed versions then |

Invariant: every prompt that an order leaves open is answered by one `Evaluated`, and the order by one
`EvaluationEnded` behind them, unless it is dropped. No credit, no record and no filter is involved.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from fa_rollout.client.base.errors import ClientError
from fa_rollout.config import Config, ConfigError, Data, Sampling, sampling_with
from fa_rollout.data.chat import PromptError
from fa_rollout.data.prompts import PromptSource
from fa_rollout.data.row import Row
from fa_rollout.generator.base.error_text import tellable, traced
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.base.tasks import first_error
from fa_rollout.generator.records.assemble import check_sample
from fa_rollout.generator.rollouts.execution import Executions, Executor, Order, reason_of
from fa_rollout.generator.turns.job import Job
from fa_rollout.process.own_threads import in_thread
from fa_rollout.rewards.outcomes import RewardsLost
from fa_rollout.sample import Sample
from fa_rollout.user_code.failure import UserCodeFailed, in_one_line, told
from trainer_hook import messages as m
from trainer_hook.calls.evaluation import EvaluatedPrompt, EvaluatedSample

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 32 << 20
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist())


class Evaluator:
    """The evaluations of this generator's life."""

    def __init__(
        self, config: Config, *, executor: Executor, sending: Gate, send: Callable[[m.Message], None]
    ) -> None:
        self._config = config
        self._executor = executor
        self._sending = sending
        self._send = send
        self._slots = asyncio.Semaphore(config.evaluation.max_concurrent_samples)
        self._running: dict[int, asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, message: m.RunEvaluation, tasks: asyncio.TaskGroup) -> None:
        """Carry an order out."""
        name = f"evaluation-{message.evaluation}"
        task = self._running[message.evaluation] = tasks.create_task(self._run(message), name=name)
        task.add_done_callback(lambda _: self._running.pop(message.evaluation, None))

    def drop(self, number: int) -> None:
        """Nobody waits for it any more: its requests are ended."""
        if number in self._running:
            self._running[number].cancel()

    def drop_all(self) -> None:
        """The generator ends; what is left open is the next life's."""
        for number in list(self._running):
            self.drop(number)

    async def _run(self, message: m.RunEvaluation) -> None:
        error = None
        try:
            with ExitStack() as files, first_error():
                work = await self._open(message, files)
                await self._all(work, set(message.done))
        except ConfigError as mistake:
            error = tellable(str(mistake))
        except Exception as failure:  # whatever it is: training goes on without this evaluation
            logger.warning("event=evaluation_failed number=%d\n%s", message.evaluation, traced(failure))
            error = tellable(f"the evaluation ended early: {told(failure)}")
        self._send(m.EvaluationEnded(evaluation=message.evaluation, error=error))

    async def _open(self, message: m.RunEvaluation, files: ExitStack) -> "_Work":
        """What an order asks for, all settings in place; `files` closes what was opened.

        Raises:
            ConfigError: there is no such data set, it cannot be read, or a sampling key is wrong.
        """
        order, settings = message.order, self._config.evaluation
        sampling = sampling_with(self._config.sampling, settings.sampling | order.sampling)
        row, num_prompts = await self._rows(order, files)
        return _Work(
            number=message.evaluation,
            row=row,
            num_prompts=num_prompts,
            num_samples=order.samples_per_prompt or settings.samples_per_prompt,
            sampling=sampling,
        )

    async def _rows(self, order: m.EvaluationOrder, files: ExitStack) -> tuple[Callable[[int], Row], int]:
        """Rows by index, and how many there are."""
        prompts, settings = order.prompts, self._config.evaluation
        if prompts is not None:
            return lambda index: _row(prompts[index], self._config.data), len(prompts)
        path = settings.path if order.dataset is None else settings.datasets.get(order.dataset, order.dataset)
        if path is None:
            raise ConfigError(
                "an evaluation must name prompts or a file where evaluation.path names none, found neither"
            )
        data = msgspec.structs.replace(self._config.data, path=path, metadata_keys=None)
        source = await in_thread(PromptSource.open, data)
        files.callback(source.close)
        return source.row, len(source)

    async def _all(self, work: "_Work", done: set[int]) -> None:
        """As many prompts side by side as there are places; each of them takes what it needs of these."""
        indices = iter(sorted(set(range(work.num_prompts)) - done))
        num_lines = min(work.num_prompts, self._config.evaluation.max_concurrent_samples)
        async with asyncio.TaskGroup() as lines:
            running = [lines.create_task(self._line(work, indices)) for _ in range(num_lines)]
        # A task group takes a cancelled child for one that nobody misses.
        if any(line.cancelled() for line in running):
            raise SampleFailed("an evaluation must answer every prompt; one of its tasks was cancelled")

    async def _line(self, work: "_Work", indices: Iterator[int]) -> None:
        for index in indices:
            encoded = _encode(await self._prompt(work, index))
            self._send(
                m.Evaluated(evaluation=work.number, index=index, num_prompts=work.num_prompts, result=encoded)
            )

    async def _prompt(self, work: "_Work", index: int) -> EvaluatedPrompt:
        """One prompt to its end: a failure is an answer too.

        Raises:
            ConfigError: the data set changed meanwhile.
            RewardsLost: no reward can be had any more.
        """
        row = Row(prompt="", label=None, metadata={}, tools=None)
        executions: Executions = []
        failure = None
        try:
            row = work.row(index)
            async with self._sending.deadline(self._config.rollout.group_timeout_s):
                executions = await self._executor.execute(
                    work.job(index), self._place, self._order(work, row)
                )
                await self._executor.score(executions, excludes=False)
            for sample in itertools.chain(*executions):
                check_sample(sample)
        except (ConfigError, RewardsLost):
            raise
        except (SampleFailed, UserCodeFailed, ClientError, PromptError) as error:
            failure = tellable(reason_of(error))
        except Exception as error:  # a row that cannot be read, a mistake of ours: they end this prompt
            logger.warning("event=evaluation_raised index=%d\n%s", index, traced(error))
            failure = tellable(f"raised: {told(error)}")
        samples = [] if failure else [_evaluated(sample) for sample in itertools.chain(*executions)]
        return EvaluatedPrompt(
            index=index, prompt=row.prompt, label=row.label, samples=samples, failure=failure
        )

    def _order(self, work: "_Work", row: Row) -> Order:
        return Order(
            row=row,
            prompt_ids=self._executor.encode(row),
            num_samples=work.num_samples,
            sampling=work.sampling,
        )

    @asynccontextmanager
    async def _place(self, job: Job) -> AsyncIterator[None]:
        async with self._slots:
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One evaluation."""

    number: int
    row: Callable[[int], Row]
    num_prompts: int
    num_samples: int
    sampling: Sampling

    def job(self, index: int) -> Job:
        """Of one prompt; the hub is never told of its requests."""
        assignment = m.Assignment(group=index, attempt=0, epoch=0, prompt_index=index)
        return Job(assignment=assignment, stream=f"e{self.number}.", sent=True)


def _row(prompt: m.EvaluationPrompt, data: Data) -> Row:
    return Row(
        prompt=prompt.prompt,
        label=prompt.label,
        metadata=prompt.metadata,
        tools=None,
        chat_template_kwargs=dict(data.chat_template_kwargs),
    )


def _evaluated(sample: Sample) -> EvaluatedSample:
    assert sample.reward is not None
    return EvaluatedSample(
        member=sample.member,
        raw_tokens=np.concatenate([sample.prompt_ids, sample.response_ids]).astype("<i4").tobytes(),
        prompt_length=len(sample.prompt_ids),
        raw_logprobs=sample.logprobs.astype("<f4").tobytes(),
        raw_loss_mask=sample.loss_mask.astype(np.uint8).tobytes(),
        version_spans=[(span.version, span.end) for span in sample.version_spans],
        response=sample.response,
        finish_reason=str(sample.finish_reason),
        reward=float(sample.reward),
        reward_parts=sample.reward_parts,
        metadata=sample.metadata,
    )


def _encode(result: EvaluatedPrompt) -> bytes:
    """As it travels; one that cannot travel is a failed prompt."""
    try:
        encoded = _ENCODER.encode(result)
        if len(encoded) <= MAX_RESULT_BYTES:
            return encoded
        failure = (
            f"result: a prompt's samples must take {MAX_RESULT_BYTES} bytes at most, found {len(encoded)}"
        )
    except Exception as error:  # objects of the user's own fail in their own ways
        failure = f"metadata: must be plain data (numbers, text, lists, dicts): {in_one_line(error)}"
    failed = EvaluatedPrompt(index=result.index, prompt="", label=None, failure=tellable(failure))
    return _ENCODER.encode(failed)
