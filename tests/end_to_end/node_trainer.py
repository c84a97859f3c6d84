"""One rank of a job of several nodes: writes down each step, one JSON line. Its environment is that of
torchrun, but for INIT_METHOD.
"""

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainer_hook import EndOfData, PeerLost, TrainerHook


def main(folder: Path) -> int:
    """Train from the checkpoint in the folder, if there is one, to the end of the data."""
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], timeout=timeout)
    with (
        TrainerHook.attach(nodes=dist.group.WORLD) as hook,
        (folder / f"seen-{os.environ['RANK']}.jsonl").open("a") as seen,
    ):
        step = newest_of_all(folder)
        if step:
            hook.load_state_dict(torch.load(folder / f"step-{step}.pt", weights_only=True))
            with hook.update_weights():
                pass
        try:
            while True:
                with hook.next_batch() as batch:
                    note = {
                        "step": batch.step,
                        "samples": [(s.epoch, s.prompt_index, s.member) for s in batch.samples],
                        "num_micro_batches": len(batch.micro_batches()),
                        "num_tokens": sum(mb.num_loss_tokens for mb in batch.micro_batches()),
                        "num_tokens_global": batch.num_tokens_global,
                        "num_samples_global": batch.num_samples_global,
                        "reward_mean": batch.reward_mean,
                        "staleness": [s.staleness for s in batch.samples],
                        "version": batch.version,
                        "lineage": hook.lineage,
                        "rewards": [s.reward for s in batch.samples],
                    }
                with hook.update_weights():
                    pass
                seen.write(json.dumps(note) + "\n")
                seen.flush()
                torch.save(hook.state_dict(payload=True), folder / "saving.pt")
                (folder / "saving.pt").rename(folder / f"step-{hook.step}.pt")
        except EndOfData:
            return 0
        except PeerLost as error:
            print(f"PeerLost: {error}", file=sys.stderr, flush=True)
            return 3


def newest_of_all(folder: Path) -> int:
    """The newest step that every node has saved; 0 where one has none."""
    saved = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.pt")]
    newest = torch.tensor(max(saved, default=0))
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    return int(newest)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
