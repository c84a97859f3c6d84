"""slime's rollout function, called by `fa_rollout.entry`.

In: slime's arguments, a rollout id, the data source. Out: slime's own output types.
Invariant: one run per process and arguments; it is started by the first training call.
"""

import pickle
from typing import Any

from fa_rollout.config import ConfigError
from fa_rollout.slime import upstream
from fa_rollout.slime.manager.run import SlimeRollout, SlimeRun, first_index
from fa_rollout.slime.options import read_options
from trainer_hook.errors import HookError

_run: SlimeRun | None = None


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The groups of a training rollout, or slime's own evaluation while rollouts continue.

    Raises:
        ConfigError: slime's arguments are not supported.
        HookError: the run failed; the text has the generator's traceback.
    """
    if evaluation:
        return upstream.evaluate(args, rollout_id, data_source)
    try:
        made = _run_for(args, rollout_id, data_source).step(rollout_id)
    except HookError:
        close()
        raise
    _call_hooks(args, made, data_source)
    return upstream.train_output(made.groups, made.figures)


def close() -> None:
    """End the run of this process, if there is one."""
    global _run
    if _run is not None:
        _run.close()
        _run = None


def _run_for(args: Any, rollout_id: int, data_source: Any) -> SlimeRun:
    global _run
    if args is None:
        raise ConfigError(
            "fa_rollout.entry was called with args = None; pass slime's arguments, which name the engines"
        )
    if _run is not None and _run.args is not args:
        close()
    if _run is None:
        _run = SlimeRun(args, read_options(args), data_source, rollout_id)
    return _run


def _call_hooks(args: Any, made: SlimeRollout, data_source: Any) -> None:
    """The user's functions over a whole rollout, as slime calls them."""
    if args.rollout_sample_filter_path is not None:
        upstream.load_function(args.rollout_sample_filter_path)(args, made.groups)
    if args.rollout_all_samples_process_path is not None:
        others = [pickle.loads(group.payload) for group in made.departed if group.payload]
        everything = sorted([*made.groups, *others], key=first_index)
        process = upstream.load_function(args.rollout_all_samples_process_path)
        process(args, everything, data_source.get_samples)  # slime passes this method, too
