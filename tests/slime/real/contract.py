"""`fa_rollout.entry` for slime's contract test, which calls rollout functions without arguments."""

import os
from types import SimpleNamespace
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput
from slime.utils.types import Sample

import fa_rollout

_HOST, _PORT = os.environ["FA_ROLLOUT_TEST_ROUTER"].removeprefix("http://").split(":")
ARGS = SimpleNamespace(
    ci_test=False,
    custom_generate_function_path=None,
    custom_rm_path="tests.slime.real.plugins.reward",
    dynamic_sampling_filter_path=None,
    group_rm=False,
    hf_checkpoint=os.environ["FA_ROLLOUT_TEST_MODEL"],
    load=None,
    mask_offpolicy_in_partial_rollout=False,
    n_samples_per_prompt=2,
    num_rollout=10,
    over_sampling_batch_size=2,
    partial_rollout=False,
    reward_key=None,
    rollout_all_samples_process_path=None,
    rollout_batch_size=2,
    rollout_global_dataset=True,
    rollout_max_response_len=16,
    rollout_num_engines=1,
    rollout_sample_filter_path=None,
    rollout_skip_special_tokens=True,
    rollout_stop=None,
    rollout_stop_token_ids=None,
    rollout_temperature=1.0,
    rollout_top_k=-1,
    rollout_top_p=1.0,
    save=None,
    sglang_dp_size=1,
    sglang_router_ip=_HOST,
    sglang_router_port=int(_PORT),
    sglang_server_concurrency=4,
    use_distributed_post=False,
    use_rollout_routing_replay=False,
)


class _Fresh:
    """The test's data source, whose samples are finished already, with unfinished ones."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = self._source.get_samples(num_samples)
        return [[Sample(index=sample.index, prompt=sample.prompt) for sample in group] for group in groups]


def entry(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The real entry with the arguments above; evaluations are taken from a training rollout."""
    if not evaluation:
        return fa_rollout.entry(ARGS, rollout_id, _Fresh(data_source), evaluation=False)
    groups = fa_rollout.entry(ARGS, rollout_id, _Fresh(data_source), evaluation=False).samples
    samples = [sample for group in groups for sample in group]
    rewards, truncated = [sample.reward for sample in samples], [False] * len(samples)
    return RolloutFnEvalOutput(data={"few": {"rewards": rewards, "truncated": truncated, "samples": samples}})
