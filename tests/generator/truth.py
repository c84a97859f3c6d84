"""Whether a record holds what a scripted engine made, token by token, version by version."""

import numpy as np

from tests.generator.hub_end import LINEAGE, VOCAB_SIZE, Group, prompt_ids
from tests.kit.scripted import EOS_ID, expected_ids, expected_logprobs, sequence_key

Spans = list[tuple[int, int]]


def assert_is_the_engines(record: Group) -> list[Spans]:
    """Ids and log-probabilities of all samples are the engine's, each under its span's version; the spans."""
    return [_sample(record, member) for member in range(len(record.commit.rewards))]


def _sample(record: Group, member: int) -> Spans:
    tokens, prompt_len = record.tokens(member), record.commit.prompt_lens[member]
    np.testing.assert_array_equal(tokens[:prompt_len], prompt_ids(record.head.prompt_index))
    key = sequence_key(tokens[:prompt_len])
    ids = expected_ids(key, prompt_len, len(tokens), VOCAB_SIZE)
    if record.head.finish_reasons[member] == "stop":
        ids[-1] = EOS_ID
    np.testing.assert_array_equal(record.response(member), ids)
    begin, spans = 0, record.spans(member)
    for version, end in spans:
        expected = expected_logprobs(key, prompt_len + begin, prompt_len + end, f"{LINEAGE}:{version}")
        np.testing.assert_array_equal(record.column("logprobs", member)[begin:end], expected)
        begin = end
    return spans
