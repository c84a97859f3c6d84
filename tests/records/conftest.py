"""One run of the real hub and generator on a scripted engine, recorded once for all tests of a worker."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.generator.records.sample_log import FLUSH_S
from tests.hub.rig import VOCAB_SIZE, WITH_SPARE, Rig
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import TrainerHook

NUM_STEPS, GROUPS_PER_STEP, SAMPLES_PER_GROUP = 8, 4, 4
KILLED_AFTER = 3
"""Steps, then the generator is killed."""
CHANGES: dict[str, dict[str, Any]] = {
    "rollout": {
        "num_steps": NUM_STEPS,
        "groups_per_step": GROUPS_PER_STEP,
        "samples_per_group": SAMPLES_PER_GROUP,
        "staleness": 2,
        "generate": "tests.records.user_code.generate",
        "filter": "tests.records.user_code.keep",
    },
    "reward": {"function": "tests.records.user_code.reward", "key": "total"},
    "run": WITH_SPARE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run that is over."""

    folder: Path
    trained: list[tuple[int, int, int, int]]
    """(step, version, group, member) as the trainer saw them."""
    rewards: dict[tuple[int, int], float]
    responses: dict[tuple[int, int], list[int]]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    lengths = Lengths(kind="uniform", low=8, high=40, seed=3)
    script = Script(vocab_size=VOCAB_SIZE, lengths=lengths, tokens_per_s=400.0, update_s=0.02)
    run = Recorded(folder=folder, trained=[], rewards={}, responses={})
    with ScriptedEngine.start(script) as engine, Rig(folder, engine, **CHANGES) as rig:
        with rig.attach() as hook:
            for step in range(NUM_STEPS):
                if step == KILLED_AFTER:
                    time.sleep(
                        3 * FLUSH_S
                    )  # what a killed generator has not written yet is lost to the log alone
                    rig.generator().kill()
                _train(hook, run)
            hook.evaluate([{"prompt": "a question"}])
        rig.hear()
    return run


def _train(hook: TrainerHook, run: Recorded) -> None:
    with hook.next_batch() as batch:
        for sample in batch.samples:
            run.trained.append((batch.step, batch.version, sample.group, sample.member))
            run.rewards[sample.group, sample.member] = sample.reward
            run.responses[sample.group, sample.member] = sample.response_tokens.tolist()
    with hook.update_weights():
        pass
