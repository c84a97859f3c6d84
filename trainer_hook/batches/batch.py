"""A rank's part of a step: micro-batches of samples, and the totals of the whole step.

Invariant: everything here is readable inside the `with` block of `next_batch`. After the block, any access to
the ring raises StaleView, unless the batch is a copy.

Shapes: n samples and T tokens of a micro-batch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_hook.batches.group import Group
from trainer_hook.batches.packing import PackedArrays
from trainer_hook.batches.sample import Sample
from trainer_hook.batches.views import as_tensor
from trainer_hook.errors import StaleView
from trainer_hook.messages import Batch as BatchMessage

if TYPE_CHECKING:
    import torch


class MicroBatch:
    """Samples of one forward and backward pass, packed end to end.

    Each tensor is created on first use in its own memory: it is writable and holds no records in the ring.
    Arrays over T describe the token at the same position, so the model's output at t - 1 corresponds to
    `tokens[t]`, `logprobs[t]` and `loss_mask[t]`:

        logits = model(micro_batch.tokens[None], position_ids=micro_batch.position_ids[None]).logits
        logprobs = token_logprobs(logits, micro_batch)  # trainer_hook.losses
        (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()
    """

    __slots__ = ("_packed", "_version", "samples")

    def __init__(self, samples: Sequence[Sample], version: int) -> None:
        """`version`: the weight version being trained."""
        self._version = version
        self.samples: tuple[Sample, ...] = tuple(samples)
        """Includes fillers."""
        self._packed: PackedArrays | None = PackedArrays(self.samples)

    @property
    def arrays(self) -> PackedArrays:
        """The same arrays in numpy. Raises StaleView after the batch has ended."""
        if self._packed is None:
            raise StaleView(
                "a micro-batch must be read inside the `with` block of its batch; it was used after the "
                "block: keep tensors read inside it, or get the batch with next_batch(copy=True)"
            )
        return self._packed

    @property
    def tokens(self) -> "torch.Tensor":
        """[T] int64"""
        return as_tensor(self.arrays.tokens)

    @property
    def padded_tokens(self) -> "torch.Tensor":
        """[n, L] int64: one row per sample, padded on the right with 0, for models without support for packed
        sequences. A causal model needs no attention mask for right padding."""
        return as_tensor(self.arrays.padded_tokens)

    @property
    def cu_seqlens(self) -> "torch.Tensor":
        """[n + 1] int32: start of each sample, then T"""
        return as_tensor(self.arrays.cu_seqlens)

    @property
    def position_ids(self) -> "torch.Tensor":
        """[T] int64: position of each token in its sample"""
        return as_tensor(self.arrays.position_ids)

    @property
    def sample_ids(self) -> "torch.Tensor":
        """[T] int64: sample of each token; `values[sample_ids]` broadcasts per-sample values to tokens"""
        return as_tensor(self.arrays.sample_ids)

    @property
    def loss_mask(self) -> "torch.Tensor":
        """[T] float32: 1 for trained tokens; 0 for prompts, fillers and masked tokens"""
        return as_tensor(self.arrays.loss_mask)

    @property
    def response_mask(self) -> "torch.Tensor":
        """[T] bool: true for response tokens, trained or not"""
        return as_tensor(self.arrays.response_mask)

    @property
    def temperatures(self) -> "torch.Tensor":
        """[T] float32: sampling temperature of each token; divide logits by it before comparing with
        `logprobs`. 1 for prompts and greedy sampling."""
        return as_tensor(self.arrays.temperatures)

    @property
    def versions(self) -> "torch.Tensor":
        """[T] int64: weight version that sampled the token; -1 for prompts and unknown versions"""
        return as_tensor(self.arrays.versions)

    @property
    def staleness(self) -> "torch.Tensor":
        """[T] int64: the batch's version minus `versions`; -1 if unknown"""
        versions = self.versions
        return (self._version - versions).where(versions >= 0, -1)

    @property
    def logprobs(self) -> "torch.Tensor":
        """[T] float32: log-probability of softmax(logits / temperatures) under the policy that sampled the
        token; 0 for prompts"""
        return as_tensor(self.arrays.logprobs)

    @property
    def rewards(self) -> "torch.Tensor":
        """[n] float32"""
        return as_tensor(self.arrays.rewards)

    @property
    def group_reward_mean(self) -> "torch.Tensor":
        """[n] float32: over the scored samples of each sample's group, on all ranks"""
        return as_tensor(self.arrays.group_reward_mean)

    @property
    def group_reward_std(self) -> "torch.Tensor":
        """[n] float32, ddof 1"""
        return as_tensor(self.arrays.group_reward_std)

    @property
    def group_reward_count(self) -> "torch.Tensor":
        """[n] int64"""
        return as_tensor(self.arrays.group_reward_count)

    def extra(self, name: str, rows: slice = slice(None)) -> "torch.Tensor":
        """An extra column (`record.columns`): [T, ...] for columns per token, 0 for tokens without a row;
        [n, ...] for columns per sample; all rows in order for columns per item.

        `rows` selects rows, such as `slice(peer, None, num_peers)` for a context-parallel rank; only these
        rows are copied out of the ring.
        """
        return as_tensor(self.arrays.extra(name, rows))

    def advantages(self, eps: float = 1e-6) -> "torch.Tensor":
        """[n] float32: (reward - group mean) / (group std + eps), GRPO, arXiv 2402.03300; 0 for excluded
        samples."""
        advantages = (self.rewards - self.group_reward_mean) / (self.group_reward_std + eps)
        return advantages.masked_fill(as_tensor(self.arrays.is_excluded), 0.0)

    @property
    def max_seqlen(self) -> int:
        """Number of tokens of the longest sample."""
        return max(sample.prompt_length + sample.response_length for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """T"""
        return sum(sample.prompt_length + sample.response_length for sample in self.samples)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens in the loss."""
        return self.arrays.num_loss_tokens

    def close(self) -> None:
        self._packed = None


class Batch:
    """This rank's part of one step; use it inside `with hook.next_batch() as batch`."""

    def __init__(self, message: BatchMessage, groups: Sequence[Group], *, keep: bool = False) -> None:
        self._groups = groups
        self._keep = keep
        version = message.version
        self._micro_batches = tuple(
            MicroBatch([Sample(groups[part.record], part, version) for part in parts], version)
            for parts in message.micro_batches
        )
        self.step: int = message.step
        self.version: int = message.version
        """The weight version being trained; the update after the batch publishes the next version."""
        self.num_groups_global: int = message.num_groups_global
        self.num_samples_global: int = message.num_samples_global
        self.num_tokens_global: int = message.num_tokens_global
        """Response tokens in the loss over all ranks."""
        self.loss_scale: float = message.num_ranks_global / max(1, message.num_tokens_global)
        """Factor for the sum over this rank's tokens, to get the gradient of the mean over the tokens of all
        ranks. It is number of ranks / `num_tokens_global`, because DDP and FSDP average gradients over
        ranks. If gradients are summed, divide by `num_tokens_global` instead."""
        self.reward_mean: float = message.reward_mean
        """Over all ranks."""
        self.staleness: int | None = message.staleness_max
        """The version being trained minus the oldest version of a token, over all ranks."""
        self.is_last: bool = message.last
        """This is the last batch; at the end of the data it may be smaller than the others."""

    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches: the same number on every rank, with about equal numbers of tokens."""
        return self._micro_batches

    @property
    def samples(self) -> tuple[Sample, ...]:
        """This rank's samples, without fillers."""
        return tuple(s for micro_batch in self._micro_batches for s in micro_batch.samples if not s.is_filler)

    def close(self) -> None:
        """Release the batch's records. Called on leaving the `with` block."""
        if not self._keep:
            for micro_batch in self._micro_batches:
                micro_batch.close()
        for group in self._groups:
            group.close()

    def __repr__(self) -> str:
        num_samples = sum(len(micro_batch.samples) for micro_batch in self._micro_batches)
        return f"Batch(step={self.step}, version={self.version}, num_samples={num_samples})"
