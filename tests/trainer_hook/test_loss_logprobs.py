"""Log-probabilities of tokens: equal to the plain way in values and gradients, with less memory."""

import math

import pytest
import torch
from peer import Completion, Ring, batch_of

from trainer_hook.batches.batch import Batch, MicroBatch
from trainer_hook.losses import logprobs as module
from trainer_hook.losses import selected_logprobs, token_logprobs
from trainer_hook.messages import Part
from trainer_hook.record import TokenSampling

V = 40


def plain(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    scaled = logits[rows].float() / t[:, None]
    return scaled.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 3 * V, 1 << 20])
def test_values_and_gradients_are_those_of_log_softmax(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = (4 * torch.randn(9, V)).to(dtype).requires_grad_()
    expected_logits = logits.detach().clone().requires_grad_()
    rows, ids = torch.tensor([7, 0, 3, 4, 8]), torch.tensor([1, 0, 39, 7, 7])
    temperatures = torch.tensor([1.0, 0.5, 0.7, 2.0, 1.0])
    weights = torch.randn(5)

    found = selected_logprobs(logits, rows, ids, temperatures=temperatures)
    expected = plain(expected_logits, rows, ids, temperatures)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()

    assert logits.grad is not None
    assert expected_logits.grad is not None
    assert logits.grad.dtype is dtype
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(logits.grad, expected_logits.grad, atol=tolerance, rtol=tolerance)


def test_gradients_pass_the_numerical_check_under_a_support() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 6, requires_grad=True)
    rows, ids = torch.tensor([0, 2, 3]), torch.tensor([1, 5, 0])
    support = (torch.tensor([0, 2, 4, 7]), torch.tensor([1, 3, 5, 2, 0, 1, 4]))
    found = selected_logprobs(logits, rows, ids, temperatures=0.6, support=support)
    found.sum().backward()
    assert logits.grad is not None

    allowed = torch.zeros(3, 6, dtype=torch.bool)
    for row, kept in enumerate([[1, 3], [5, 2], [0, 1, 4]]):
        allowed[row, kept] = True
    twin = logits.detach().double().requires_grad_()
    expected = (twin[rows] / 0.6).masked_fill(~allowed, -math.inf).log_softmax(-1)
    picked = expected.gather(-1, ids[:, None])[:, 0]
    picked.sum().backward()
    assert twin.grad is not None
    torch.testing.assert_close(found, picked.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad, twin.grad.float(), atol=1e-6, rtol=1e-6)


def batch_with_two_turns(ring: Ring) -> Batch:
    """Sample 0 has turns at temperatures 0.5 and 2, sample 1 was greedy, sample 2 is as configured."""
    samples = [
        Completion(prompt=[1, 2], response=[3, 4, 5]),
        Completion(prompt=[6], response=[7, 8]),
        Completion(prompt=[9, 10], response=[11]),
    ]
    spans = [
        [(TokenSampling(temperature=0.5), 2), (TokenSampling(temperature=2.0), 3)],
        [(TokenSampling(temperature=0.0), 2)],
        [(TokenSampling(), 1)],
    ]
    record = ring.write(0, samples, sampling_spans=spans)
    return batch_of(ring, [record], [[Part(0, 0), Part(0, 1), Part(0, 2)]], copy=True)


def only(batch: Batch) -> MicroBatch:
    return batch.micro_batches()[0]


def test_each_token_is_divided_by_the_temperature_of_its_own_turn() -> None:
    micro_batch = only(batch_with_two_turns(Ring()))
    assert micro_batch.temperatures.tolist() == [1, 1, 0.5, 0.5, 2, 1, 1, 1, 1, 1, 1]

    torch.manual_seed(2)
    logits = torch.randn(11, V)
    found = token_logprobs(logits, micro_batch)
    positions = [2, 3, 4, 6, 7, 10]
    rows = torch.tensor(positions) - 1
    expected = plain(
        logits, rows, micro_batch.tokens[positions], torch.tensor([0.5, 0.5, 2.0, 1.0, 1.0, 1.0])
    )
    torch.testing.assert_close(found[positions], expected, atol=1e-6, rtol=1e-6)
    assert found[[0, 1, 5, 8, 9]].tolist() == [0.0] * 5


def test_a_sample_has_a_temperature_unless_its_turns_differ() -> None:
    first, second, third = only(batch_with_two_turns(Ring())).samples
    assert (second.temperature, third.temperature) == (0.0, 1.0)
    assert [(span.settings.temperature, span.end) for span in first.sampling_spans] == [(0.5, 2), (2.0, 3)]
    with pytest.raises(ValueError, match=r"has \[0.5, 2.0\]: use sampling_spans"):
        _ = first.temperature


def test_logits_of_another_layout_are_refused() -> None:
    micro_batch = only(batch_with_two_turns(Ring()))
    with pytest.raises(ValueError, match=r"T=11 packed tokens.*n=3 padded samples of L=5 .* \[1, 10, 40\]"):
        token_logprobs(torch.zeros(1, 10, V), micro_batch)


def test_padded_logits_give_what_packed_ones_do() -> None:
    micro_batch = only(batch_with_two_turns(Ring()))
    assert micro_batch.padded_tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [9, 10, 11, 0, 0]]
    torch.manual_seed(3)
    padded = torch.randn(3, 5, V)
    packed = padded[micro_batch.sample_ids, micro_batch.position_ids]
    expected = token_logprobs(packed, micro_batch)
    torch.testing.assert_close(token_logprobs(padded, micro_batch), expected)
    torch.testing.assert_close(token_logprobs(packed[None], micro_batch), expected)
