"""What serves a run ends alone when it fails, with a clear error: the generator goes on."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fa_rollout.data.prompts import PromptSource
from fa_rollout.data.row import Row
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.base.pulse import Heart
from fa_rollout.generator.records.partials import PartialKeeper
from tests.generator.virtual import VirtualRun
from trainer_hook import EvaluatedPrompt
from trainer_hook import messages as m


class _Rows:
    """A file of three rows, of which one cannot be made into Python objects."""

    def __init__(self, *, closes: bool) -> None:
        self._closes = closes

    def __len__(self) -> int:
        return 3

    def row(self, index: int) -> Row:
        if index == 1:
            raise OverflowError("a date of year 29,000")
        return Row(prompt=f"test {index}", label=index, metadata={}, tools=None)

    def close(self) -> None:
        if not self._closes:
            raise OSError("it cannot be closed")


def _evaluate(run: VirtualRun) -> tuple[list[EvaluatedPrompt], m.Message]:
    """(results, the last answer)"""
    run.say(m.Evaluate(request=900, order=m.EvaluationOrder(dataset="odd")))
    number = cast(m.EvaluationBegun, run.to_rank_box.pop(900)).evaluation
    results: list[EvaluatedPrompt] = []
    for request in range(901, 1400):
        run.say(m.Collect(request=request, evaluation=number))
        while (answer := run.to_rank_box.pop(request, None)) is None:
            for flight in list(run.engines.flights.values()):
                flight.make(9, run.engines.label)
                run.engines.land(flight, "stop")
            run.step(0.6)
            time.sleep(0.001)  # a thread opens the file
        if not isinstance(answer, m.EvaluationPart):
            return results, answer
        results += [msgspec.msgpack.decode(result, type=EvaluatedPrompt) for result in answer.results]
        if answer.is_over:
            return results, answer
    raise AssertionError("it does not end")


@pytest.mark.parametrize("closes", [True, False])
def test_a_row_that_cannot_be_read_fails_its_prompt_and_a_broken_file_its_evaluation(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptSource, "open", lambda data: _Rows(closes=closes))
    run = VirtualRun(tmp_path)
    try:
        results, answer = _evaluate(run)
        assert not run.serving.done()
    finally:
        run.close()
    if closes:
        failures = {result.index: result.failure for result in results}
        assert "OverflowError: a date of year 29,000" in str(failures.pop(1))
        assert not [text for text in failures.values() if text and "OverflowError" in text]
        assert len(failures) == 2
    else:
        assert isinstance(answer, m.Refused)
        assert answer.text.startswith("the evaluation ended early: OSError: it cannot be closed")


@pytest.mark.parametrize("path", ["/no/such/folder/file", "a\0path"])
def test_partials_that_cannot_be_written_are_answered_for_and_said(path: str) -> None:
    said: list[str] = []

    async def save() -> m.PartialsSaved:
        keeper = PartialKeeper(_config(), cast(Any, None), Gate(), warn=said.append)
        order = m.SavePartials(number=4, path=path, limit_bytes=1 << 20, interrupt_s=0.0)
        return await keeper.save(order, lambda: [])

    saved = asyncio.run(save())
    assert (saved.number, saved.num_groups) == (4, 0)
    (text,) = said
    assert text.startswith("the tokens of unfinished groups are not in the checkpoint: ")


def _config() -> Any:
    class Config:
        sampling = msgspec.defstruct("Sampling", [("seed", int, 0)])()

    return Config()


def test_figures_that_cannot_be_had_are_said_once_and_the_pulse_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fa_rollout.generator.base.pulse.PULSE_S", 0.05)
    sent: list[m.Message] = []

    def figures() -> m.Pulse:
        raise ZeroDivisionError

    async def beat() -> None:
        heart = Heart(sent.append)
        heart.figures = figures
        beating = asyncio.create_task(heart.run())
        while sum(isinstance(message, m.Pulse) for message in sent) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        beating.cancel()

    asyncio.run(beat())
    assert sum(isinstance(message, m.Warned) for message in sent) == 1
