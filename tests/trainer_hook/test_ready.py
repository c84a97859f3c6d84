"""A batch can be asked for without waiting, by a trainer that has something else to do."""

import select
from pathlib import Path

import pytest
from peer import Completion, Hub, Line

from trainer_hook import TrainerHook
from trainer_hook import messages as m
from trainer_hook.errors import EndOfData

GROUP = [Completion(prompt=[1, 2], response=[3, 4])]
BOTH = [[m.Part(0, 0)]]


def wait(hook: TrainerHook) -> None:
    """Until the hub says something, at most as long as the test has."""
    poll = select.poll()
    poll.register(hook.fileno(), select.POLLIN)
    assert poll.poll(20_000)


def test_a_batch_that_was_asked_for_is_ready_when_it_has_come(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        record = line.ring.write(0, GROUP)
        line.serve([record], BOTH)
        line.receive(m.Released)
        request = line.receive(m.Next)
        line.send(m.Ended(request=request.request, reason="all steps are trained"))
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        while not hook.is_batch_ready():
            wait(hook)
        assert hook.is_batch_ready(), "asking again asks for the same"
        with hook.next_batch() as batch:
            assert [sample.tokens.tolist() for sample in batch.samples] == [[1, 2, 3, 4]]
        while not hook.is_batch_ready():
            wait(hook)
        with pytest.raises(EndOfData), hook.next_batch():
            pass
