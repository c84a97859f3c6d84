"""The rollout functions that a plug-in calls: groups, rewards, hooks, evaluation."""

import asyncio
import copy
import uuid
from typing import Any

from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.http_utils import get_rollout_num_engines, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


class GenerateState(metaclass=SingletonMeta):
    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.semaphore: Any = asyncio.Semaphore(
            args.sglang_server_concurrency * get_rollout_num_engines(args)
        )
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
        }
        if args.rollout_top_p != 1.0:
            self.sampling_params["custom_params"] = {"return_top_p_token_ids": True}
        self.processor = Processor() if args.multimodal_keys else None
        self.aborted = False


class Processor:
    """Turns a prompt with images into ids, and into what is trained on."""

    def __call__(self, sample: Sample, tokenizer: Any) -> Any:
        assert sample.multimodal_inputs is not None
        sample.multimodal_train_inputs = {
            "pixels": [len(image) for image in sample.multimodal_inputs["images"]]
        }
        return tokenizer.encode(sample.prompt, add_special_tokens=False)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    main = (args.sglang_router_ip, args.sglang_router_port)
    host, port = (args.sglang_model_routers or {}).get(model_name, main)
    return f"http://{host}:{port}{endpoint}"


def _prepare_prompt_ids(sample: Sample, tokenizer: Any, processor: Any) -> Any:
    if processor is not None and sample.multimodal_inputs and not sample.tokens:
        return processor(sample, tokenizer)
    return sample.tokens or tokenizer.encode(sample.prompt, add_special_tokens=False)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    state = GenerateState(args)
    prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    sampling_params["max_new_tokens"] -= sample.response_length
    sample.tokens = sample.tokens or list(prompt_ids)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload: dict[str, Any] = {"sampling_params": sampling_params, "return_logprob": True}
    images = (sample.multimodal_inputs or {}).get("images")
    payload |= {"text": sample.prompt, "image_data": images} if images else {"input_ids": prompt_ids}
    with trace_span(sample, "sglang_generate") as span:
        output = await post(url, payload)
        span.update(build_sglang_meta_trace_attrs(output["meta_info"]))
    entries = output["meta_info"].get("output_token_logprobs", [])
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in entries],
        log_probs=[entry[0] for entry in entries],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


async def generate_and_rm(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    async with GenerateState(args).semaphore:
        path = sample.generate_function_path or args.custom_generate_function_path
        if path is not None:
            sample = await load_function(path)(args, sample, sampling_params)
        else:
            sample = await generate(args, sample, sampling_params)
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    if args.group_rm:
        return sample
    made = sample if isinstance(sample, list) else [sample]
    if any(one.status == Sample.Status.ABORTED for one in made):
        return sample
    for one in made:
        if one.reward is None:
            one.reward = await async_rm(args, one)
    return sample


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    for sample in group:
        sample.session_id = sample.session_id or str(uuid.uuid4())
    made = await asyncio.gather(
        *(
            asyncio.create_task(
                generate_and_rm(args, sample, _seeded(args, sampling_params, member), evaluation=evaluation)
            )
            for member, sample in enumerate(group)
        )
    )
    if args.group_rm:
        for sample, reward in zip(made, await batched_async_rm(args, made), strict=True):
            sample.reward = reward
    return list(made)


def _seeded(args: Any, sampling_params: dict[str, Any], member: int) -> dict[str, Any]:
    is_seeded = getattr(args, "sglang_enable_deterministic_inference", False)
    return sampling_params | ({"sampling_seed": args.rollout_seed + member} if is_seeded else {})


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Evaluation in the calling process; training rollouts are the plug-in's."""
    assert evaluation
    samples = [copy.deepcopy(sample) for group in data_source.evaluation for sample in group]
    return RolloutFnEvalOutput(
        data={
            "held_out": {
                "rewards": [0.5] * len(samples),
                "truncated": [False] * len(samples),
                "samples": samples,
            }
        }
    )
