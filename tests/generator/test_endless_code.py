"""A generate function that takes turns without end costs its own group, before the trainer gives up."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.job import Job
from fa_rollout.user_code.deadline import Deadline
from tests.hub.rig import Rig
from tests.kit.scripted import Lengths, ScriptedEngine
from trainer_hook import EndOfData
from trainer_hook.messages import Assignment

Play = Callable[..., ScriptedEngine]
GENERATE = {"generate": "tests.generator.endless_code.generate", "max_failure_rate": 1.0}


def test_turns_without_end_cost_their_group_alone_and_the_reason_names_line_and_limit(
    tmp_path: Path, play: Play
) -> None:
    rig = Rig(tmp_path / "run", play(lengths=Lengths(tokens=4), prefill_s=0.05))
    rig.config["rollout"] |= GENERATE
    rig.config["trainer"] = {"stall_s": 4.0}
    num_groups = 0
    with rig, rig.attach() as hook:
        while True:
            try:
                with hook.next_batch() as batch:
                    num_groups += len({sample.group for sample in batch.samples})
            except EndOfData:
                break
            with hook.update_weights():
                pass
    assert num_groups == 24
    (failed,) = rig.events("failed")
    assert failed["group"] == 1
    rule = r"generate: timeout: it took turn after turn for 2\.8 s, .* \(80% of trainer\.stall_s\)"
    assert re.match(rule + r"; it has been at .*endless_code\.py:\d+ in generate", failed["reason"])


def test_only_work_that_engines_were_there_for_and_many_turns_count() -> None:
    async def work() -> None:
        gate = Gate()
        clock = gate.deadline(None)
        job = Job(assignment=Assignment(group=0, attempt=0, epoch=0, prompt_index=0))
        job.active_s = lambda: clock.active_s
        endless, few_turns = Deadline(60.0, "idle"), Deadline(60.0, "idle")
        ended: list[Deadline] = []
        async with clock:
            with job.calling(endless), job.calling(few_turns):
                for deadline in (endless, few_turns):
                    deadline.start(partial(ended.append, deadline))
                for _ in range(3):
                    endless.renew()
                await asyncio.sleep(0.2)
                gate.freeze("engines", True)
                await asyncio.sleep(0.3)
                assert 0.2 <= clock.active_s < 0.3
                job.end_calls(0.4, "rule")
                assert not ended
                gate.freeze("engines", False)
                await asyncio.sleep(0.21)
                job.end_calls(0.4, "rule")
                assert ended == [endless]
                assert endless.rule == "rule"
                few_turns.stop()

    asyncio.run(work())
