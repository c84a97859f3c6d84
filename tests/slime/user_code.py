"""What a slime user writes: rewards, generate functions, hooks, filters; run in the generator."""

import asyncio
import copy
import signal
from types import FrameType
from typing import Any

import aiohttp
from slime.rollout import sglang_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward_by_length(args: Any, sample: Sample) -> float:
    return float(sample.response_length)


async def rewards_of_a_group(args: Any, samples: list[Sample]) -> list[float]:
    return [float(len(samples))] * len(samples)


async def reward_that_raises(args: Any, sample: Sample) -> float:
    if sample.group_index == 2:
        raise ArithmeticError("the reward of group 2 cannot be computed")
    return 1.0


async def reward_that_cancels_itself(args: Any, sample: Sample) -> float:
    if sample.group_index == 2:
        raise asyncio.CancelledError
    return 1.0


async def reward_that_never_returns(args: Any, sample: Sample) -> float:
    if sample.group_index == 2:
        await asyncio.Event().wait()
    return 1.0


async def reward_with_an_alarm(args: Any, sample: Sample) -> float:
    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        while True:
            pass
    except TimeoutError:
        return 7.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def two_of_each(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """One execution, two trainable samples (fan-out)."""
    made = await one_turn(args, sample, sampling_params)
    made.rollout_id = made.index
    other = copy.deepcopy(made)
    other.metadata["part"] = 2
    return [made, other]


async def one_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function of the user's own, by slime's `post`."""
    tokens = sample.tokens or [3 + ord(c) % 30 for c in sample.prompt]
    sampling_params["max_new_tokens"] -= sample.response_length
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(
        url, {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True}
    )
    entries = output["meta_info"].get("output_token_logprobs") or []
    sample.tokens = list(tokens)
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in entries],
        log_probs=[entry[0] for entry in entries],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    sample.metadata["by"] = "one_turn"
    return sample


async def turns_without_end(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Of its first sample, the one of group 2."""
    made = await one_turn(args, sample, sampling_params)
    while sample.index == 2 * args.n_samples_per_prompt:
        await one_turn(args, copy.deepcopy(sample), sampling_params)
    return made


async def by_a_client_of_its_own(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Knows nothing of slime's `post`, as functions that stream do not."""
    sample.tokens = sample.tokens or [3 + ord(c) % 30 for c in sample.prompt]
    sampling_params["max_new_tokens"] -= sample.response_length
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session:
        while "meta_info" not in output:  # a router has no worker for a moment
            async with session.post(url, json=body) as response:
                output = await response.json()
    entries = output["meta_info"].get("output_token_logprobs") or []
    ids, log_probs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    meta, text = output["meta_info"], output["text"]
    sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=meta, text=text)
    return sample


async def judged_by_another_model(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Asks a second model, by its name, what it makes of the answer."""
    made = await one_turn(args, sample, sampling_params)
    url = sglang_rollout.get_model_url(args, "judge")
    verdict = await post(url, {"input_ids": made.tokens, "sampling_params": {"max_new_tokens": 1}})
    made.metadata["verdict"] = verdict["output_ids"]
    return made


async def with_a_preface(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Changes the prompt, then has slime's own function do the rest."""
    sample.prompt = f"now {sample.prompt}"
    made: Sample = await sglang_rollout.generate(args, sample, sampling_params)
    return made


def note_rollout_id(args: Any, sample: Sample, rollout_id: int | None) -> None:
    sample.metadata["hooked_in"] = rollout_id


def keep_one_in_five(args: Any, group: list[Sample]) -> DynamicFilterOutput:
    keep = group[0].group_index % 5 == 0  # type: ignore[operator]
    return DynamicFilterOutput(keep=keep, reason=None if keep else "not_a_fifth")


def keep_none(args: Any, group: list[Sample]) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=False, reason="zero_std")


def remove_first(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].remove_sample = True


def count_all(args: Any, groups: list[list[Sample]], data_source: Any) -> None:
    source = data_source.__self__  # slime gives the method by which groups are taken
    source.seen = getattr(source, "seen", []) + [group[0].group_index for group in groups]
