"""One of three ranks on three nodes that agree once, and then wait for one that has stopped.

python -m tests.trainer_hook.nodes_rank RANK STORE

In each of two groups another rank keeps silent in the second round. Out: one JSON line for each of them, with
what this rank's second round said; null for the silent one.
"""

import datetime
import json
import os
import sys
import time
from typing import Any

import torch.distributed as dist

from trainer_hook.errors import PeerLost
from trainer_hook.session.nodes import Nodes

NUM_RANKS = 3
TIMEOUT_S = 2.0
SILENT = (1, 0)


def main(rank: int, store: str) -> None:
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=patience
    )
    for silent in SILENT:
        group: Any = dist.new_group(backend="gloo", timeout=patience)
        nodes = Nodes(group, speaks=True, node=rank, timeout_s=TIMEOUT_S)
        assert nodes.exchange(rank) == [0, 1, 2]
        dist.barrier()
        said = None
        if rank != silent:
            try:
                nodes.exchange(0)
            except PeerLost as error:
                said = str(error)
        else:
            time.sleep(2 * TIMEOUT_S)
        print(json.dumps(said), flush=True)
        dist.barrier()
    os._exit(0)  # groups that timed out are not taken down in order


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
