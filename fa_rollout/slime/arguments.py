"""slime's arguments as a run of fa_rollout. Pure, but for the length of the data.

In: the arguments of slime's parser. Out: what cannot be done with them, or the configuration of the run.
"""

from typing import Any

from fa_rollout.config import ConfigError
from fa_rollout.filters import default_bound
from fa_rollout.slime.options import Options

_BYTES_PER_TOKEN = 9
"""Token, log-probability and mask."""
_MIN_RING_BYTES, _MAX_RING_BYTES = 64 << 20, 1 << 30
_OWN_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."
_HEARTBEAT_S = 120.0
"""slime's reward functions run in the generator's event loop and may block it for long."""


def check_arguments(args: Any) -> None:
    """Check that fully asynchronous rollouts support these arguments.

    Raises:
        ConfigError: they do not; the text says why.
    """
    if getattr(args, "colocate", False) or getattr(args, "offload_rollout", False):
        raise ConfigError(
            "fa_rollout needs engines that keep their memory: with --colocate or --offload-rollout slime "
            "releases it while requests are running, which kills the engines; use separate GPUs for rollout "
            "(--rollout-num-gpus)"
        )
    if not getattr(args, "rollout_global_dataset", True):
        raise ConfigError(
            "fa_rollout takes prompts from slime's data source; remove --disable-rollout-global-dataset"
        )
    if getattr(args, "rollout_data_transport", None) == "straw":
        raise ConfigError(
            "fa_rollout keeps prompts over a checkpoint, which --rollout-data-transport straw cannot "
            "restore: use object-store"
        )
    if getattr(args, "use_score_centering", False):
        raise ConfigError(
            "fa_rollout does not request the columns that score centering needs: remove --use-score-centering"
        )
    if getattr(args, "flush_cache_interval", 1) not in (1, None):
        raise ConfigError(
            "fa_rollout needs weight updates that end every request, so that the version of each token is "
            f"known: --flush-cache-interval must be 1, found {args.flush_cache_interval}"
        )


def num_rollouts(args: Any, data_source: Any) -> int:
    """Rollout ids of the whole training; by epochs where slime counts by these."""
    if args.num_rollout is not None:
        return int(args.num_rollout)
    return len(data_source) // int(args.rollout_batch_size) * int(args.num_epoch)


def update_interval(args: Any) -> int:
    """Steps trained per weight version."""
    return (
        1 if getattr(args, "release_train", False) else int(getattr(args, "update_weights_interval", 1) or 1)
    )


def config_tree(args: Any, options: Options, *, num_steps: int, num_prompts: int) -> dict[str, Any]:
    """The run's configuration, as nested tables.

    `num_prompts`: of one epoch; 0 where the data source does not tell.
    A batch of `train_async` is handed over one update before it is trained: the hub, which counts from the
    hand-over, gets a bound that is one less.
    """
    staleness = max(0, options.staleness - 1)
    surplus = max(0, int(args.over_sampling_batch_size or 0) - int(args.rollout_batch_size))
    return {
        "data": {"path": "fed by slime's data source"},
        "reward": {"function": "slime's own"},
        "rollout": {
            "num_steps": max(1, num_steps),
            "groups_per_step": int(args.rollout_batch_size),
            "samples_per_group": int(args.n_samples_per_prompt),
            "update_interval": update_interval(args),
            "staleness": staleness,
            "staleness_policy": options.staleness_policy,
            "partial": "resume" if args.partial_rollout else "restart",
            "surplus_groups": surplus,
            "max_attempts": options.max_attempts,
            "idle_timeout_s": options.idle_timeout_s,
            "max_rejections": options.max_rejections or default_bound(num_prompts),
        },
        "engine": {
            "urls": [f"http://{args.sglang_router_ip}:{args.sglang_router_port}"],
            "router": True,
            "max_concurrent_samples": int(args.sglang_server_concurrency),
            "request_timeout_s": options.request_timeout_s,
        },
        "ring": {"bytes": _ring_bytes(args, options, staleness + 1)},
        "trainer": {"num_ranks": 1, "stall_s": options.stall_s},
        "run": {
            "heartbeat_s": _HEARTBEAT_S,
            "generator_restarts": options.generator_restarts,
            "output_dir": options.log_dir,
        },
    }


def _ring_bytes(args: Any, options: Options, num_versions: int) -> int | str:
    """Space for all groups that may wait, at a quarter of the longest responses, within limits."""
    if options.ring_bytes is not None:
        return options.ring_bytes
    num_samples = int(args.rollout_batch_size) * int(args.n_samples_per_prompt)
    longest = num_samples * int(args.rollout_max_response_len) * _BYTES_PER_TOKEN
    wanted = max(longest, longest * num_versions * update_interval(args) // 4)
    return min(max(wanted, _MIN_RING_BYTES), max(_MAX_RING_BYTES, 2 * longest))


def takes_fast_path(args: Any, options: Options) -> bool:
    """Whether plain prompts use fa_rollout's client; else slime's `generate` makes all requests."""
    is_split = getattr(args, "prefill_num_servers", None) or getattr(args, "sglang_config", None)
    outside = getattr(args, "rollout_external_engine_infos", None) or []
    is_split = is_split or any(engine["worker_type"] in ("prefill", "decode") for engine in outside)
    return options.fast_client and not is_split


def shows_samples(args: Any) -> bool:
    """Whether code that is not slime's own may look at samples in the generator, and expect lists there.

    slime's reward models by `--rm-type` read texts, and its dynamic filters rewards.
    """
    paths = [args.custom_generate_function_path, args.custom_rm_path, args.rollout_all_samples_process_path]
    paths += getattr(args, "rollout_sample_hook_path", None) or []
    if not (args.dynamic_sampling_filter_path or "").startswith(_OWN_FILTERS):
        paths.append(args.dynamic_sampling_filter_path)
    return any(path is not None for path in paths)


def num_engines(args: Any) -> int:
    """Engines behind the router, as slime counts them."""
    if getattr(args, "rollout_num_engines", None) is not None:
        return int(args.rollout_num_engines)
    num_gpus = int(getattr(args, "rollout_num_gpus", 0) or 0)
    return max(1, num_gpus // int(getattr(args, "rollout_num_gpus_per_engine", 1) or 1)) if num_gpus else 0
