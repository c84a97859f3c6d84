# mypy: disable-error-code="import-not-found, import-untyped"
"""The names of slime that fa_rollout uses, all in one place; importing them imports torch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """slime, as its functions are called and replaced here."""

    Sample: Any
    sglang_rollout: Any
    http_utils: Any
    sample_hooks: Any
    filters: Any
    traces: Any
    load_function: Callable[[str], Callable[..., Any]]


def load() -> Upstream:
    """Import what a generator needs."""
    from slime.observability import trace_utils
    from slime.rollout import sample_hooks, sglang_rollout
    from slime.rollout.filter_hub import base_types
    from slime.utils import http_utils
    from slime.utils.misc import load_function
    from slime.utils.types import Sample

    for function in (sglang_rollout.generate_and_rm, sglang_rollout.generate_and_rm_group):
        _keep_signature(function)
    return Upstream(
        Sample=Sample,
        sglang_rollout=sglang_rollout,
        http_utils=http_utils,
        sample_hooks=sample_hooks,
        filters=base_types,
        traces=trace_utils,
        load_function=load_function,
    )


def _keep_signature(function: Any) -> None:
    """slime's tracing asks for it in every call; found once, it is told from there on."""
    traced = inspect.unwrap(function)
    traced.__signature__ = inspect.signature(traced)


def train_output(samples: list[Any], metrics: dict[str, Any]) -> Any:
    """What slime takes back from a training rollout."""
    from slime.rollout.base_types import RolloutFnTrainOutput

    return RolloutFnTrainOutput(samples=samples, metrics=metrics)


def evaluate(args: Any, rollout_id: int, data_source: Any) -> Any:
    """slime's own evaluation, in the calling process: its state and its client are not the generator's."""
    from slime.rollout.sglang_rollout import generate_rollout

    return generate_rollout(args, rollout_id, data_source, evaluation=True)


def load_function(path: str) -> Callable[..., Any]:
    """A user's function by its dotted path, as slime finds it."""
    from slime.utils.misc import load_function as load_by_path

    function: Callable[..., Any] = load_by_path(path)
    return function


def load_tokenizer(args: Any) -> Any:
    """The tokenizer that slime encodes prompts with."""
    from slime.utils.processing_utils import load_tokenizer as load_by_folder

    return load_by_folder(args.hf_checkpoint, trust_remote_code=True)


def sample_status() -> Any:
    """slime's enumeration of sample states."""
    from slime.utils.types import Sample

    return Sample.Status


def source_of(sample: Any) -> Any:
    """Name of the data that a sample is from."""
    from slime.utils.data import get_source

    return get_source(sample)


def check_routed_experts(experts: list[Any], args: Any) -> None:
    """slime's check of routing replays."""
    from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay

    validate_rollout_routed_experts_for_replay(experts, args)
