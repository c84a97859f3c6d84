"""What a trainer's calls say to the hub, and what they make of its answers."""

from pathlib import Path

import pytest
from peer import Completion, Hub, Line

from trainer_hook import (
    EndOfData,
    TrainerHook,
)
from trainer_hook import messages as m
from trainer_hook.messages import Outcome, Part

GROUP = [
    Completion(prompt=[1, 2], response=[3, 4, 5], reward=1.0),
    Completion(prompt=[1, 2], response=[6], reward=0.0),
]
BOTH = [[Part(0, 0), Part(0, 1)]]


def test_a_trained_step_is_reported_with_its_records_and_the_next_one_asked_for(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        for step in range(2):
            record = line.ring.write(step, GROUP)
            assert line.serve([record], BOTH).step == step
            released = m.Released(step=step, outcome=Outcome.TRAINED, sequences=[record.sequence])
            assert line.receive(m.Released) == released
        request = line.receive(m.Next)
        line.send(m.Ended(request=request.request, reason="all 2 steps are trained"))
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        seen = []
        for step in range(2):
            with hook.next_batch() as batch:
                assert (batch.step, hook.step) == (step, step)
                seen.append([sample.tokens.tolist() for sample in batch.samples])
        assert seen == [[[1, 2, 3, 4, 5], [1, 2, 6]]] * 2
        with pytest.raises(EndOfData, match="all 2 steps"), hook.next_batch():
            pass
        assert hook.step == 2
