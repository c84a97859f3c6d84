"""One node's rank of a job of two nodes: writes down each step, one JSON line.

python -m tests.end_to_end.node_trainer OUTPUT NODE STORE_PORT
"""

import datetime
import json
import sys
from pathlib import Path

import torch.distributed as dist

from trainer_hook import EndOfData, PeerLost, TrainerHook


def main(output: Path, node: int, port: int) -> int:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=node,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    with (
        TrainerHook.attach(dp_rank=0, dp_size=1, nodes=dist.group.WORLD) as hook,
        output.open("w") as seen,
    ):
        while True:
            try:
                with hook.next_batch() as batch:
                    note = {
                        "step": batch.step,
                        "samples": [(s.epoch, s.prompt_index, s.member) for s in batch.samples],
                        "num_micro_batches": len(batch.micro_batches()),
                        "num_tokens": sum(mb.num_loss_tokens for mb in batch.micro_batches()),
                        "num_tokens_global": batch.num_tokens_global,
                        "num_samples_global": batch.num_samples_global,
                        "reward_mean": batch.reward_mean,
                        "rewards": [s.reward for s in batch.samples],
                    }
            except EndOfData:
                return 0
            except PeerLost as error:
                print(f"PeerLost: {error}", file=sys.stderr)
                return 3
            seen.write(json.dumps(note) + "\n")
            seen.flush()
            with hook.update_weights():
                pass


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
