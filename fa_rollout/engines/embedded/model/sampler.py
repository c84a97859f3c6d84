"""From logits to tokens, for all rows at once.

A row's token depends on its own logits, seed and position alone, never on the other rows: the random number
is a hash of (seed, position), and the draw inverts the cumulative distribution. Log-probs are of
softmax(logits / temperature) over the full vocabulary, before top-k, top-p and min-p.

Shapes: N rows, V vocabulary, K top entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fa_rollout.engines.embedded.model.request import GenerationRequest, TopEntries

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token a row."""

    token_ids: list[int]
    logprobs: list[float]
    are_finite: bool
    """False: some row's logits are not numbers, and so neither are its tokens."""
    top: list[TopEntries] | None = None


def sample(logits_NV: torch.Tensor, requests: Sequence[GenerationRequest]) -> Sampled:
    """Draw the next token of every request. `logits_NV` float32; changed in place."""
    for row, request in enumerate(requests):
        if request.adjuster is not None:
            request.adjuster.apply(logits_NV[row])
    temperatures_N = [request.temperature for request in requests]
    if any(temperature != 1.0 for temperature in temperatures_N):
        logits_NV /= torch.tensor(temperatures_N)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    tokens_N = _choose(logprobs_NV, requests)
    chosen_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
    return Sampled(
        token_ids=tokens_N.tolist(),
        logprobs=chosen_N.tolist(),
        are_finite=bool(torch.isfinite(chosen_N).all()),
        top=top_entries(logprobs_NV, [request.num_top for request in requests]),
    )


def top_entries(logprobs_NV: torch.Tensor, num_top_N: Sequence[int]) -> list[TopEntries] | None:
    """The most likely tokens of each row, or None when no row wants any."""
    most = max(num_top_N)
    if most == 0:
        return None
    values_NK, ids_NK = logprobs_NV.topk(most, dim=-1)
    return [
        list(zip(values[:num], ids[:num], strict=True))
        for values, ids, num in zip(values_NK.tolist(), ids_NK.tolist(), num_top_N, strict=True)
    ]


def _choose(logprobs_NV: torch.Tensor, requests: Sequence[GenerationRequest]) -> torch.Tensor:
    greedy = [row for row, request in enumerate(requests) if request.is_greedy]
    if len(greedy) == len(requests):
        return logprobs_NV.argmax(dim=-1)
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    positions = np.array([request.num_tokens for request in requests], dtype=np.uint64)
    uniform_N = torch.from_numpy(uniforms(seeds, positions))
    tokens_N = _invert(logprobs_NV.exp(), uniform_N)
    truncated = [row for row, request in enumerate(requests) if request.is_truncated]
    if truncated:
        params = [requests[row].params for row in truncated]
        probs_NV, order_NV = logprobs_NV[truncated].exp().sort(dim=-1, descending=True, stable=True)
        _truncate(probs_NV, [(p.top_k, p.top_p, p.min_p) for p in params])
        ranks_N = _invert(probs_NV, uniform_N[truncated])
        tokens_N[truncated] = order_NV.gather(1, ranks_N[:, None])[:, 0]
    if greedy:
        tokens_N[greedy] = logprobs_NV[greedy].argmax(dim=-1)
    return tokens_N


def _truncate(probs_NV: torch.Tensor, limits: Sequence[tuple[int, float, float]]) -> None:
    """Zero what top-k, top-p and min-p cut from rows sorted in descending order."""
    vocab_size = probs_NV.shape[1]
    top_k_N1 = torch.tensor([vocab_size if top_k < 1 else top_k for top_k, _, _ in limits])[:, None]
    top_p_N1 = torch.tensor([top_p for _, top_p, _ in limits])[:, None]
    min_p_N1 = torch.tensor([min_p for _, _, min_p in limits])[:, None]
    before_NV = probs_NV.cumsum(dim=-1) - probs_NV
    least_N1 = probs_NV[:, :1] * min_p_N1
    cut_NV = (before_NV > top_p_N1) | (torch.arange(vocab_size) >= top_k_N1) | (probs_NV < least_N1)
    probs_NV[cut_NV] = 0.0


def _invert(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """Index of the first entry whose cumulative probability exceeds uniform * total.

    In float64: the sum over a large vocabulary in float32 would lose its rare tokens.
    """
    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    target_N1 = (uniform_N * cumulative_NV[:, -1])[:, None]
    index_N = torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0]
    return index_N.clamp_(max=probs_NV.shape[1] - 1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) that depend on (seed, position) alone. splitmix64's mixer, twice."""
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    # 48 bits: uniform * total then stays below the total after rounding, so that no cut token is drawn
    return (bits >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
