"""The whole loop: a generator process between a scripted engine and the test as its hub."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fa_rollout.engines.scripted import (
    Lengths,
    Script,
    ScriptedEngine,
    expected_ids,
    expected_logprobs,
    sequence_key,
)
from tests.generator.hub_end import LINEAGE, VOCAB_SIZE, HubEnd, run_tree
from trainer_hook import messages as m


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine.start(Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=12))) as engine:
        yield engine


def test_a_group_goes_from_assignment_to_a_record_that_equals_what_the_engine_sampled(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        (ready,) = hub.wait_for(m.GeneratorReady)
        assert (ready.num_prompts, ready.spans, ready.concurrency) == (20, True, 64)
        hub.issue(3, 4)
        answers = hub.answers(2)
        assert {g for said in hub.all(m.Dispatched) for g in said.groups} == {3, 4}
        for group in (3, 4):
            commit = answers[group]
            assert isinstance(commit, m.Commit)
            record = hub.read(commit)
            assert record.head.prompt_index == group
            assert record.head.label == group
            for member in range(2):
                tokens = record.tokens(member)
                prompt_len = commit.prompt_lens[member]
                key = sequence_key(tokens[:prompt_len])
                ids = expected_ids(key, prompt_len, prompt_len + 11, VOCAB_SIZE)
                assert record.response(member)[:11].tolist() == ids.tolist()
                logprobs = expected_logprobs(key, prompt_len, prompt_len + 11, f"{LINEAGE}:0")
                np.testing.assert_array_equal(record.column("logprobs", member)[:11], logprobs)
                assert record.column("loss_mask", member).tolist() == [1] * 12
                assert record.spans(member) == [(0, 12)]
            assert record.arrays["rewards"].tolist() == [12.0, 12.0]
