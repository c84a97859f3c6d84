"""slime's rollout manager and train loop in small, around the real plug-in and scripted engines.

`Manager` calls the rollout function as slime's does; `train_async` keeps slime's order of calls: version 1
first, then for each step the next rollout before this step's save and update.
"""

import json
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from slime.rollout.data_source import DataSource
from slime.utils.types import Sample

import fa_rollout
from tests.generator.hub_end import VOCAB_SIZE, write_model
from tests.kit.scripted import ScriptedEngine, expected_ids, expected_logprobs, sequence_key

CODE = "tests.slime.user_code"


def arguments(folder: Path, router: str, **changes: Any) -> SimpleNamespace:
    """slime's arguments, as far as they are read; two samples a group, four groups a batch."""
    host, port = router.removeprefix("http://").split(":")
    plain: dict[str, Any] = {
        "advantage_estimator": "grpo",
        "custom_generate_function_path": None,
        "custom_reward_post_process_path": None,
        "custom_rm_path": f"{CODE}.reward_by_length",
        "dynamic_sampling_filter_path": None,
        "group_rm": False,
        "grpo_std_normalization": True,
        "hf_checkpoint": str(write_model(folder)),
        "load": None,
        "mask_offpolicy_in_partial_rollout": False,
        "moe_router_topk": 2,
        "multimodal_keys": None,
        "n_samples_per_prompt": 2,
        "num_epoch": None,
        "num_layers": 2,
        "num_prompts": 1000,
        "num_rollout": 6,
        "over_sampling_batch_size": None,
        "partial_rollout": True,
        "rewards_normalization": True,
        "reward_key": None,
        "rollout_all_samples_process_path": None,
        "rollout_batch_size": 4,
        "rollout_max_response_len": 64,
        "rollout_num_engines": 1,
        "rollout_sample_filter_path": None,
        "rollout_sample_hook_path": None,
        "rollout_seed": 42,
        "rollout_skip_special_tokens": True,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_temperature": 1.0,
        "rollout_top_k": -1,
        "rollout_top_p": 1.0,
        "save": None,
        "sglang_model_routers": None,
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "sglang_server_concurrency": 16,
        "update_weights_interval": 1,
        "use_distributed_post": True,
        "use_rollout_routing_replay": False,
    }
    return SimpleNamespace(**(plain | changes))


class Manager:
    """Calls the rollout function, and keeps what it gave."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.source = DataSource(args)
        self.batches: dict[int, list[Any]] = {}
        self.metrics: dict[int, dict[str, Any]] = {}

    def generate(self, rollout_id: int) -> list[Any]:
        output = fa_rollout.entry(self.args, rollout_id, self.source, evaluation=False)
        self.batches[rollout_id], self.metrics[rollout_id] = output.samples, output.metrics
        return self.batches[rollout_id]

    def evaluate(self, rollout_id: int) -> Any:
        return fa_rollout.entry(self.args, rollout_id, self.source, evaluation=True)

    @property
    def samples(self) -> list[Sample]:
        """All that was handed over, flat."""
        return [s for batch in self.batches.values() for group in batch for s in flat(group)]

    @property
    def ages(self) -> list[int]:
        """Versions between each answer's and the one that trains its batch, where every step has one."""
        return [
            step + 1 - int(label)
            for step, batch in self.batches.items()
            for group in batch
            for sample in flat(group)
            for label in sample.weight_versions
        ]

    @property
    def trained(self) -> list[int]:
        """Group indices in the order of their hand-over."""
        return [flat(group)[0].group_index for batch in self.batches.values() for group in batch]


def flat(group: Sequence[Any]) -> list[Sample]:
    return [s for member in group for s in (member if isinstance(member, list) else [member])]


def train_async(
    manager: Manager,
    engines: Sequence[ScriptedEngine],
    *,
    steps: range,
    save_after: int | None = None,
    stop_after: int | None = None,
    meanwhile: Callable[[int], None] = lambda step: None,
) -> None:
    """slime's order: `generate(k + 1)` has ended before step k is saved and before the update after it."""
    version = 1
    update(engines, version)
    manager.generate(steps[0])
    for step in steps:
        if step + 1 in steps:
            manager.generate(step + 1)
        meanwhile(step)
        if step == save_after:
            manager.source.save(step)
        if step == stop_after:
            return
        version += 1
        update(engines, version)


def train_sync(
    manager: Manager,
    engines: Sequence[ScriptedEngine],
    *,
    steps: range,
    save_after: int | None = None,
    stop_after: int | None = None,
) -> None:
    """The order of slime's plain loop: generate k, train k, save k, update."""
    version = 1
    update(engines, version)
    for step in steps:
        manager.generate(step)
        if step == save_after:
            manager.source.save(step)
        if step == stop_after:
            return
        version += 1
        update(engines, version)


def update(engines: Sequence[ScriptedEngine], version: int) -> None:
    """What slime's trainer does to engines, told to nobody."""
    for engine in engines:
        post(engine.url, "/pause_generation", {})
    for engine in engines:
        body = {"model_path": "none", "weight_version": str(version)}
        post(engine.url, "/update_weights_from_disk", body)
        post(engine.url, "/continue_generation", {})


def post(url: str, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as response:
        response.read()


def assert_true_to_engine(sample: Sample) -> None:
    """Ids are those that the scripted engine gives for the prompt; log-probabilities are of told versions."""
    num_prompt = len(sample.tokens) - sample.response_length
    key = sequence_key(np.array(sample.tokens[:num_prompt]))
    response = np.array(sample.tokens[num_prompt:])
    stop = num_prompt + sample.response_length
    expected = expected_ids(key, num_prompt, stop, VOCAB_SIZE)
    if sample.status == Sample.Status.COMPLETED:
        expected = np.append(expected[:-1], response[-1])  # the stop token
    assert response.tolist() == expected.tolist()
    assert sample.rollout_log_probs is not None
    told = [expected_logprobs(key, num_prompt, stop, label) for label in sample.weight_versions]
    near = np.isclose(np.stack(told), np.array(sample.rollout_log_probs, np.float32), atol=1e-5)
    assert near.any(axis=0).all()
