"""Batches for a `torch.utils.data.DataLoader`.

    from trainer_hook.dataset import RolloutDataset

    loader = DataLoader(RolloutDataset(hook), batch_size=None)
    for batch in loader:                                   # one `Batch` per step: this rank's part
        for micro_batch in batch.micro_batches():
            logprobs = token_logprobs(model(micro_batch.padded_tokens).logits, micro_batch)
            (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()
        optimizer.step()
        with hook.update_weights() as update:
            update.push(model)

In: a hook. Out: its steps, until the data ends. Invariant: each batch is a copy, so it outlives its lease.
A step counts as trained at this rank's next call of `update_weights`, `state_dict` or `close`, or when the
next batch is requested; if the rank is lost earlier, the step is not trained. A loader that prefetches
batches counts them too early.
"""

from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from trainer_hook.batches.batch import Batch
from trainer_hook.errors import EndOfData, HookStateError
from trainer_hook.hook import TrainerHook


class RolloutDataset(IterableDataset[Batch]):
    """The remaining steps of a run; one iteration yields all of them."""

    def __init__(self, hook: TrainerHook) -> None:
        self._hook = hook

    def __iter__(self) -> Iterator[Batch]:
        """Raises the errors of `TrainerHook.next_batch`, except EndOfData, which ends the iteration."""
        if get_worker_info() is not None:
            raise HookStateError(
                "RolloutDataset must be read in the trainer's own process, found a DataLoader worker: pass "
                "num_workers=0 to the DataLoader (generation already runs in a separate process)"
            )
        while True:
            try:
                batch = self._hook._stepping.lend()
            except EndOfData:
                return
            yield batch
