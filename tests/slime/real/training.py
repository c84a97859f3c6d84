"""A training by slime's own `train_async`, with an actor that trains nothing: run as a program by the tests.

    python training.py ENGINES LOG -- OPTIONS OF SLIME'S

ENGINES are addresses, separated by commas; each trained step is a line of JSON in LOG.
"""

import functools
import json
import os
import sys
import time
from typing import Any

import ray
import train_async
from slime.ray.placement_group import create_training_models
from slime.ray.ray_actor import RayActor
from slime.utils.arguments import parse_args
from slime.utils.data import process_rollout_data


class Actor(RayActor):
    """Makes the calls of slime's training actor, in its order, without a model."""

    def __init__(self, world_size: int, rank: int, master_addr: Any, master_port: Any) -> None:
        self.world_size, self.rank, self.version = world_size, rank, 0
        self.master_addr, self.master_port = master_addr or "127.0.0.1", master_port or 29500

    def init(self, args: Any, role: str, **options: Any) -> int:
        self.args = args
        args.rank, args.world_size = self.rank, self.world_size
        return int(os.environ.get("FA_ROLLOUT_TEST_START", "0"))

    def set_rollout_manager(self, manager: Any) -> None:
        self.manager = manager
        shape = {
            "dp_size": self.world_size,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        if self.rank == 0:
            ray.get(manager.set_train_parallel_config.remote(shape))

    def train(self, rollout_id: int, data_ref: Any, external_data: Any = None) -> None:
        data = process_rollout_data(self.args, data_ref, self.rank, self.world_size)
        time.sleep(float(os.environ.get("FA_ROLLOUT_TEST_TRAIN_S", "0.3")))
        line = {
            "step": rollout_id,
            "indices": data["sample_indices"],
            "lengths": [len(tokens) for tokens in data["tokens"]],
            "masks": [int(mask.sum()) for mask in data["loss_masks"]],
            "types": sorted({type(tensor).__name__ for tensor in data["tokens"]}),
            "kept": [len(ids) for ids in data.get("rollout_top_p_token_ids", [])],
            "experts": [list(experts.shape) for experts in data.get("rollout_routed_experts", [])],
        }
        with open(os.environ["FA_ROLLOUT_TEST_LOG"], "a") as log:
            log.write(json.dumps(line) + "\n")

    def update_weights(self) -> None:
        engines, *_ = ray.get(self.manager.get_updatable_engines_and_lock.remote())
        self.version += 1
        if self.rank:
            return
        ray.get([engine.pause_generation.remote() for engine in engines])
        ray.get([engine.flush_cache.remote() for engine in engines])
        label = str(self.version)
        ray.get([e.update_weights_from_disk.remote(model_path="none", weight_version=label) for e in engines])
        ray.get([engine.continue_generation.remote() for engine in engines])
        ray.get(self.manager.clear_updatable_num_new_engines.remote())

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        return None


def main() -> None:
    engines, log, _, *options = sys.argv[1:]
    os.environ["FA_ROLLOUT_TEST_LOG"] = log
    sys.argv = ["train_async.py", "--rollout-external-engine-addrs", *engines.split(","), *options]
    args = parse_args()
    ray.init(num_cpus=8, num_gpus=args.actor_num_gpus_per_node, include_dashboard=False, log_to_driver=True)
    train_async.create_training_models = functools.partial(create_training_models, actor_cls=Actor)
    train_async.train(args)


if __name__ == "__main__":
    main()
