"""A rank's part of a step: micro-batches of samples, and the figures of the whole step.

Invariant: everything here can be read inside the `with` block of `next_batch`; after it, whatever would touch
the ring raises StaleView (or goes on to work, if the batch was taken as a copy).

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

    Tensors are fresh memory, each made at its first use: take them to a device or write to them as you like.
    They hold nothing in the ring. Arrays over T speak of the token at their own position, so the model's
    output at t - 1 belongs to `tokens[t]`, `logprobs[t]` and `loss_mask[t]`:

        logits = model(micro_batch.tokens[None], position_ids=micro_batch.position_ids[None]).logits
        logprobs = token_logprobs(logits, micro_batch)  # trainer_hook.losses
        (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()
    """

    __slots__ = ("_packed", "_version", "samples")

    def __init__(self, samples: Sequence[Sample], version: int) -> None:
        """`version`: weight version that trains them."""
        self._version = version
        self.samples: tuple[Sample, ...] = tuple(samples)
        """Fillers included."""
        self._packed: PackedArrays | None = PackedArrays(self.samples)

    @property
    def arrays(self) -> PackedArrays:
        """The same arrays in numpy. Raises StaleView after the batch has ended."""
        if self._packed is None:
            raise StaleView(
                "a micro-batch is read inside the `with` block of its batch, and was used after it: keep "
                "tensors that you took inside, or take the batch with next_batch(copy=True)"
            )
        return self._packed

    @property
    def tokens(self) -> "torch.Tensor":
        """[T] int64"""
        return as_tensor(self.arrays.tokens)

    @property
    def padded_tokens(self) -> "torch.Tensor":
        """[n, L] int64: a row for each sample, 0 behind its tokens, for models that do not take packed
        sequences; a causal model needs no attention mask for padding on the right"""
        return as_tensor(self.arrays.padded_tokens)

    @property
    def cu_seqlens(self) -> "torch.Tensor":
        """[n + 1] int32: where each sample starts, and T"""
        return as_tensor(self.arrays.cu_seqlens)

    @property
    def position_ids(self) -> "torch.Tensor":
        """[T] int64: position of each token in its own sample"""
        return as_tensor(self.arrays.position_ids)

    @property
    def sample_ids(self) -> "torch.Tensor":
        """[T] int64: sample of each token; `values[sample_ids]` spreads values of samples over tokens"""
        return as_tensor(self.arrays.sample_ids)

    @property
    def loss_mask(self) -> "torch.Tensor":
        """[T] float32: 1 where the token is trained on; 0 for prompts, fillers and masked tokens"""
        return as_tensor(self.arrays.loss_mask)

    @property
    def response_mask(self) -> "torch.Tensor":
        """[T] bool: true at response tokens, trained on or not"""
        return as_tensor(self.arrays.response_mask)

    @property
    def temperatures(self) -> "torch.Tensor":
        """[T] float32: what logits are divided by before they are compared with `logprobs`: the temperature
        that the token was sampled at; 1 at prompts and where sampling was greedy"""
        return as_tensor(self.arrays.temperatures)

    @property
    def versions(self) -> "torch.Tensor":
        """[T] int64: weight version that sampled the token; -1 at prompts and where it is unknown"""
        return as_tensor(self.arrays.versions)

    @property
    def staleness(self) -> "torch.Tensor":
        """[T] int64: version that trains the batch minus `versions`; -1 where that is unknown"""
        versions = self.versions
        return (self._version - versions).where(versions >= 0, -1)

    @property
    def logprobs(self) -> "torch.Tensor":
        """[T] float32: log-probability under the policy that sampled the token, of
        softmax(logits / temperatures); 0 at prompts"""
        return as_tensor(self.arrays.logprobs)

    @property
    def rewards(self) -> "torch.Tensor":
        """[n] float32"""
        return as_tensor(self.arrays.rewards)

    @property
    def group_reward_mean(self) -> "torch.Tensor":
        """[n] float32: over the scored samples of each sample's group, wherever they are trained"""
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
        """An extra column (`record.columns`): [T, ...] where tokens have rows, 0 for those without; [n, ...]
        where each sample has one value; all rows in order where samples have any number of them.

        `rows` are the ones that are wanted, such as `slice(peer, None, num_peers)` of a context-parallel
        rank: no more than these are taken out of the ring.
        """
        return as_tensor(self.arrays.extra(name, rows))

    def advantages(self, eps: float = 1e-6) -> "torch.Tensor":
        """[n] float32: (reward - group mean) / (group std + eps), as GRPO has it, arXiv 2402.03300; 0 for an
        excluded member."""
        advantages = (self.rewards - self.group_reward_mean) / (self.group_reward_std + eps)
        return advantages.masked_fill(as_tensor(self.arrays.is_excluded), 0.0)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sample."""
        return max(sample.prompt_length + sample.response_length for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """T"""
        return sum(sample.prompt_length + sample.response_length for sample in self.samples)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens with a loss mask of 1."""
        return self.arrays.num_loss_tokens

    def close(self) -> None:
        self._packed = None


class Batch:
    """What this rank trains in one step; use it inside `with hook.next_batch() as batch`."""

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
        """Weight version that trains this batch; the update after it publishes the next one."""
        self.num_groups_global: int = message.num_groups_global
        self.num_samples_global: int = message.num_samples_global
        self.num_tokens_global: int = message.num_tokens_global
        """Response tokens in the loss over all ranks."""
        self.loss_scale: float = message.num_ranks_global / max(1, message.num_tokens_global)
        """What a sum over this rank's tokens is multiplied by, so that the gradient is that of the mean over
        the tokens of all ranks: DDP and FSDP average gradients over ranks, hence their number. Divide by
        `num_tokens_global` alone where gradients are summed."""
        self.reward_mean: float = message.reward_mean
        """Over all ranks."""
        self.staleness: int | None = message.staleness_max
        """Version that trains the batch minus the oldest version among its tokens, over all ranks."""
        self.is_last: bool = message.last
        """No batch follows; it may be smaller than the others where the data ends."""

    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches: as many as on every other rank, and of about as many tokens."""
        return self._micro_batches

    @property
    def samples(self) -> tuple[Sample, ...]:
        """This rank's samples, each once; fillers left out."""
        return tuple(s for micro_batch in self._micro_batches for s in micro_batch.samples if not s.is_filler)

    def close(self) -> None:
        """End the batch: let go of the ring. Called on leaving the `with` block."""
        if not self._keep:
            for micro_batch in self._micro_batches:
                micro_batch.close()
        for group in self._groups:
            group.close()

    def __repr__(self) -> str:
        num_samples = sum(len(micro_batch.samples) for micro_batch in self._micro_batches)
        return f"Batch(step={self.step}, version={self.version}, num_samples={num_samples})"
