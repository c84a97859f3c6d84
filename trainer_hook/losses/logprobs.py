"""Log-probabilities of sampled tokens under the model that trains, as the engine defines them.

An engine reports log softmax(logits / temperature) of each token it samples. A ratio of the two is right only
if the trainer divides by the same temperature.

Only the rows of sampled tokens are computed, a few at a time and in float32, forward and backward: beside the
logits and their gradient no array of T x V exists.

Shapes: M rows of logits, R of them selected, V vocabulary, S entries of a support.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from trainer_hook.batches.batch import MicroBatch

_CHUNK_ELEMENTS = 1 << 24
"""Elements of logits that are worked on at once: 64 MiB in float32."""

Support = tuple[torch.Tensor, torch.Tensor]
"""Tokens that sampling allowed: offsets [R + 1] int64 into ids [S] int64, for each selected row in turn."""


def token_logprobs(
    logits: torch.Tensor, micro_batch: "MicroBatch", *, support: Support | None = None
) -> torch.Tensor:
    """[T] float32: log-probability of each response token under `logits`; 0 at prompts.

    Comparable with `micro_batch.logprobs`: both are log softmax(logits / temperature).

    Args:
        logits: output of the model in any floating dtype: [T, V] or [1, T, V] for `micro_batch.tokens`, or
            [n, L, V] for `micro_batch.padded_tokens`; the row of a token predicts the next one.
        support: tokens that top-p and top-k left, for each response token in order; the softmax runs over
            these alone. Compare with log-probabilities of the same truncated distribution only.

    Raises:
        ValueError: `logits` has neither of these shapes.
    """
    device = logits.device
    response_R = micro_batch.response_mask.nonzero()[:, 0]
    logprobs_R = selected_logprobs(
        logits.reshape(-1, logits.shape[-1]),
        (_rows(logits.shape, micro_batch)[response_R] - 1).to(device),
        micro_batch.tokens[response_R].to(device),
        temperatures=micro_batch.temperatures[response_R].to(device),
        support=support,
    )
    out_T = torch.zeros(micro_batch.num_tokens, dtype=torch.float32, device=device)
    return out_T.index_put((response_R.to(device),), logprobs_R)


def _rows(shape: torch.Size, micro_batch: "MicroBatch") -> torch.Tensor:
    """[T] row of each token in the logits, samples packed or padded."""
    num_tokens, padded = micro_batch.num_tokens, micro_batch.padded_tokens.shape
    match tuple(shape[:-1]):
        case (n,) | (1, n) if n == num_tokens:
            return torch.arange(num_tokens)
        case found if found == tuple(padded):
            return micro_batch.sample_ids * padded[1] + micro_batch.position_ids
    raise ValueError(
        f"logits must be [T, V] or [1, T, V] with T={num_tokens} packed tokens, or [n, L, V] with "
        f"n={padded[0]} padded samples of L={padded[1]} tokens; found {list(shape)}"
    )


def selected_logprobs(
    logits_MV: torch.Tensor,
    rows_R: torch.Tensor,
    ids_R: torch.Tensor,
    *,
    temperatures: torch.Tensor | float = 1.0,
    support: Support | None = None,
) -> torch.Tensor:
    """[R] float32: log softmax(logits_MV[rows_R] / temperatures)[ids_R], for any layout of the logits.

    Args:
        logits_MV: [M, V] floating; gradients have its dtype.
        rows_R: [R] int64, a row for each token; no row twice.
        ids_R: [R] int64, the token that each row predicts.
        temperatures: [R] or a number, above 0.
        support: see `token_logprobs`.
    """
    temperatures_R = torch.as_tensor(temperatures, dtype=torch.float32, device=logits_MV.device)
    selected: Callable[..., torch.Tensor] = _Selected.apply
    return selected(logits_MV, rows_R, ids_R, temperatures_R.expand(len(rows_R)), support)


class _Selected(torch.autograd.Function):
    """Keeps log Z of each row instead of the softmax, which the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_MV: torch.Tensor,
        rows_R: torch.Tensor,
        ids_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        support: Support | None,
    ) -> torch.Tensor:
        logprobs_R = torch.empty(len(rows_R), dtype=torch.float32, device=logits_MV.device)
        log_z_R = torch.empty_like(logprobs_R)
        for part in _chunks(len(rows_R), logits_MV.shape[1]):
            scaled_cV = _scaled(logits_MV, rows_R, temperatures_R, part, support)
            log_z_R[part] = scaled_cV.logsumexp(-1)
            logprobs_R[part] = scaled_cV.gather(-1, ids_R[part, None])[:, 0] - log_z_R[part]
        ctx.save_for_backward(logits_MV, rows_R, ids_R, temperatures_R, log_z_R)
        ctx.support = support
        return logprobs_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """d log p(id) / d logit = (1[id] - softmax) / temperature"""
        logits_MV, rows_R, ids_R, temperatures_R, log_z_R = ctx.saved_tensors
        grad_MV = torch.zeros_like(logits_MV)
        for part in _chunks(len(rows_R), logits_MV.shape[1]):
            softmax_cV = _scaled(logits_MV, rows_R, temperatures_R, part, ctx.support)
            softmax_cV.sub_(log_z_R[part, None]).exp_()
            scale_c = grad_R[part] / temperatures_R[part]
            grad_cV = softmax_cV.mul_(-scale_c[:, None])
            grad_cV.scatter_add_(-1, ids_R[part, None], scale_c[:, None])
            grad_MV[_rows_at(rows_R[part])] = grad_cV.to(grad_MV.dtype)
        return grad_MV, None, None, None, None


def _chunks(num_rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _rows_at(rows_c: torch.Tensor) -> slice | torch.Tensor:
    """An index for these rows: a slice, which copies nothing, where they follow one another."""
    first, last = int(rows_c[0]), int(rows_c[-1])
    follow = last - first == len(rows_c) - 1 and bool((rows_c.diff() == 1).all())
    return slice(first, last + 1) if follow else rows_c


def _scaled(
    logits_MV: torch.Tensor,
    rows_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    part: slice,
    support: Support | None,
) -> torch.Tensor:
    """[c, V] float32, fresh memory: rows of logits over their temperatures, -inf outside of the support."""
    rows_cV = logits_MV[_rows_at(rows_R[part])]
    scaled_cV = rows_cV.to(torch.float32, copy=True).div_(temperatures_R[part, None])
    if support is None:
        return scaled_cV
    offsets, ids_S = support
    starts_c, ends_c = offsets[part], offsets[part.start + 1 : part.stop + 1]
    row_of_S = torch.repeat_interleave(torch.arange(len(starts_c), device=ids_S.device), ends_c - starts_c)
    allowed_cV = torch.zeros_like(scaled_cV, dtype=torch.bool)
    allowed_cV[row_of_S, ids_S[starts_c[0] : ends_c[-1]]] = True
    return scaled_cV.masked_fill_(~allowed_cV, float("-inf"))
