"""Batches for people who want a `torch.utils.data.DataLoader`.

    from trainer_hook.dataset import RolloutDataset

    loader = DataLoader(RolloutDataset(hook), batch_size=None)
    for batch in loader:                                   # one `Batch` a step, this rank's part
        for micro_batch in batch.micro_batches():
            logprobs = token_logprobs(model(micro_batch.padded_tokens).logits, micro_batch)
            (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()
        optimizer.step()
        with hook.update_weights() as update:
            update.push(model)

In: a hook. Out: its steps, until the data ends. Invariant: a batch is a copy, so that it outlives its lease.
Its step counts as trained with this rank's next call of `update_weights`, `state_dict` or `close`, or when
the next batch is asked for: a rank that is lost before that has not trained it. A loader that asks for
batches ahead counts them too early.
"""

from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from trainer_hook.batches.batch import Batch
from trainer_hook.errors import EndOfData, HookStateError
from trainer_hook.hook import TrainerHook


class RolloutDataset(IterableDataset[Batch]):
    """The steps of a run from where the hook stands; one iteration goes through all that are left."""

    def __init__(self, hook: TrainerHook) -> None:
        self._hook = hook

    def __iter__(self) -> Iterator[Batch]:
        """Raises as `TrainerHook.next_batch` does, apart from EndOfData, which ends the iteration."""
        if get_worker_info() is not None:
            raise HookStateError(
                "a rollout dataset must be read in the trainer's own process, found a worker; generation is "
                "a process of its own already: pass num_workers=0 to the DataLoader"
            )
        while True:
            try:
                batch = self._hook._stepping.lend()
            except EndOfData:
                return
            yield batch
