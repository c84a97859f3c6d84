"""The pure parts of the scripted engine: decoding on a given clock, lengths, tokens, rules."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_rollout.simulation.decoder import Decoder
from tests.kit.scripted import Lengths, Rule, expected_ids, expected_logprobs, sequence_key
from tests.kit.scripted.faults import Faults
from tests.kit.scripted.job import Job
from tests.kit.scripted.lengths import length_source
from tests.kit.scripted.oracle import PERIOD
from tests.kit.scripted.render import answer


def job(length: int) -> Job:
    return Job(rid="r", key=7, prompt_tokens=3, length=length, finish={"type": "stop"})


def play(decoder: Decoder, until_s: float, start_s: float = 0.0) -> dict[float, list[Job]]:
    """Advance from event to event; what finished when."""
    now, finished = start_s, {}
    while (delay_s := decoder.next_finish_s()) is not None and now + delay_s <= until_s:
        now += delay_s
        decoder.advance(now)
        if done := decoder.finished():
            finished[round(now, 3)] = done
    decoder.advance(until_s)
    return finished


def test_each_request_decodes_at_its_own_rate() -> None:
    decoder = Decoder(10.0, 0.0)
    decoder.advance(0.0)
    short, long = job(10), job(25)
    decoder.join(short)
    decoder.join(long)
    assert play(decoder, 2.0) == {1.0: [short]}
    assert decoder.made(long) == 20
    assert play(decoder, 3.0, 2.0) == {2.5: [long]}
    assert decoder.num_running == 0


def test_a_limit_on_all_together_is_shared() -> None:
    decoder = Decoder(10.0, 10.0)
    decoder.advance(0.0)
    first, second = job(10), job(20)
    decoder.join(first)
    decoder.join(second)
    assert play(decoder, 10.0) == {2.0: [first], 3.0: [second]}


def test_frozen_time_makes_no_token_and_a_retracted_request_keeps_what_it_made() -> None:
    decoder = Decoder(10.0, 0.0)
    decoder.advance(0.0)
    one = job(20)
    decoder.join(one)
    decoder.advance(1.0)
    decoder.freeze()
    assert decoder.next_finish_s() is None
    decoder.advance(50.0)
    assert decoder.made(one) == 10
    decoder.leave(one)
    decoder.thaw()
    decoder.join(one)
    assert play(decoder, 60.0, 50.0) == {51.0: [one]}


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), total=st.sampled_from([0.0, 40.0]))
def test_all_requests_finish_and_the_shorter_of_two_first(lengths: list[int], total: float) -> None:
    decoder = Decoder(7.0, total)
    decoder.advance(0.0)
    jobs = [job(length) for length in lengths]
    for one in jobs:
        decoder.join(one)
    order = [one for _, done in sorted(play(decoder, 1e6).items()) for one in done]
    assert sorted(map(id, order)) == sorted(map(id, jobs))
    assert [one.length for one in order] == sorted(lengths)


@pytest.mark.parametrize(
    ("lengths", "rule"),
    [
        (Lengths(tokens=9), lambda n: n == 9),
        (Lengths(kind="uniform", low=3, high=5), lambda n: 3 <= n <= 5),
        (Lengths(kind="lognormal", tokens=100, low=50, high=200), lambda n: 50 <= n <= 200),
    ],
)
def test_lengths_keep_to_their_model_and_repeat_by_seed(
    lengths: Lengths, rule: Callable[[int], bool]
) -> None:
    draws = [[source() for _ in range(200)] for source in (length_source(lengths), length_source(lengths))]
    assert draws[0] == draws[1]
    assert all(map(rule, draws[0]))


def test_a_trace_is_played_in_order_and_again(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.txt"
    trace.write_text("5\n7\n")
    for lengths in (Lengths(kind="list", values=[5, 7]), Lengths(kind="list", path=str(trace))):
        source = length_source(lengths)
        assert [source() for _ in range(5)] == [5, 7, 5, 7, 5]
    with pytest.raises(ValueError, match="whole numbers from 1 on"):
        length_source(Lengths(kind="list", values=[3, 0]))


def test_tokens_depend_on_sequence_and_position_and_log_probabilities_on_the_version_too() -> None:
    key = sequence_key([1, 2, 3])
    ids = expected_ids(key, 10, 50, 500)
    np.testing.assert_array_equal(ids[5:], expected_ids(key, 15, 50, 500))
    assert ids.min() >= 2
    assert ids.max() < 500
    assert (ids != expected_ids(sequence_key([1, 2, 4]), 10, 50, 500)).any()
    old, new = (expected_logprobs(key, 10, 50, label) for label in ("0:1", "0:2"))
    assert (old <= 0).all()
    assert (old != new).any()


@pytest.mark.parametrize("length", [1, 100, PERIOD + 10, 2 * PERIOD])
def test_answers_cut_from_rendered_text_are_the_expected_tokens(length: int) -> None:
    one = job(length)
    half = max(1, length // 2)
    spans = [("a", half), ("b", length)] if length > 1 else [("a", 1)]
    tree = msgspec.json.decode(answer(one, {"type": "length", "length": length}, spans, length, {}, 999))
    assert tree["output_ids"] == expected_ids(7, 3, 3 + length, 999).tolist()
    items = tree["meta_info"]["output_token_logprobs"]
    assert [item[1] for item in items] == tree["output_ids"]
    values = [item[0] for item in items]
    assert values[:half] == expected_logprobs(7, 3, 3 + half, "a").tolist()
    assert values[half:] == expected_logprobs(7, 3 + half, 3 + length, "b").tolist()


def test_rules_skip_step_and_end() -> None:
    faults = Faults([Rule(rid="a", skip=1, every=2, times=2)])
    met = [faults.meet("/generate", rid) is not None for rid in ["a"] * 8 + ["b"]]
    assert met == [False, True, False, True, False, False, False, False, False]
    starts = Faults([Rule(prompt_start=[1, 2])])
    assert starts.meet("/generate", "x", [1, 2, 3])
    assert not starts.meet("/generate", "x", [1, 3])
    assert not starts.meet("/abort_request", "x", [1, 2])
