"""The user's own code: imported and tried where a run would call it."""

import inspect
import time
from collections.abc import Sequence

from fa_rollout.config import Config, ConfigError
from fa_rollout.doctor.outcome import Outcome, error, ok, skipped, warning
from fa_rollout.filters import GroupFilter
from fa_rollout.rewards.outcomes import RewardFailed, RewardOutcome, RewardsLost
from fa_rollout.rewards.runner import RewardRunner
from fa_rollout.sample import Sample
from fa_rollout.user_code.dotted import is_url, resolve
from fa_rollout.user_code.failure import failed

_PATIENCE_S = 5.0
"""With a reward server that does not answer."""
_LOOP_S = 0.001
"""A plain function that takes longer has no place in the event loop."""


async def reward(config: Config, samples: list[Sample]) -> list[Outcome]:
    """Import it and score a group of samples, in its worker process and within its time."""
    runner = RewardRunner(config.reward, patience_s=_PATIENCE_S)
    name = config.reward.function
    try:
        await runner.start()
        if not samples:
            return [skipped("reward", f"{name} is imported; no prompt was encoded, so nothing is scored")]
        await runner.score(samples)  # the first call pays for imports
        began_s = time.monotonic()
        found = await runner.score(samples)
        each_s = (time.monotonic() - began_s) / (1 if config.reward.group else len(samples))
    except (ConfigError, RewardsLost) as failure:
        return [
            error("reward", str(failure), "mend reward.function; `python -c 'import ...'` shows the same")
        ]
    finally:
        await runner.aclose()
    return [_judged(config, name, found, each_s)]


def _judged(config: Config, name: str, found: Sequence[RewardOutcome], each_s: float) -> Outcome:
    failed = next((one for one in found if isinstance(one, RewardFailed)), None)
    if failed is not None:
        text = f"{name} must score a sample, found {failed.reason}: {failed.text}"
        return error("reward", text, "mend the function; a group with a failed reward is not trained")
    values = [f"{one.value:g}{_parts(one.parts)}" for one in found if not isinstance(one, RewardFailed)]
    alike = f"{values[0]} to each of {len(values)} samples" if len(set(values)) == 1 < len(values) else ""
    text = f"{name} gives {alike or ', '.join(values)}; {_ms(each_s)} a call"
    where = "in the loop" if config.reward.in_loop else f"{config.reward.num_workers} workers"
    if config.reward.in_loop and each_s > _LOOP_S:
        fix = "reward.in_loop = false: every request of every engine waits while it runs"
        return warning("reward", f"{text}, in the event loop", fix)
    return ok("reward", f"{text}, {'asked over HTTP' if is_url(name) else where}")


def group_filter(config: Config, samples: list[Sample]) -> list[Outcome]:
    """Import it and let it judge a group."""
    path = config.rollout.filter
    if path is None:
        return []
    try:
        judge = GroupFilter.load(path)
    except ConfigError as failure:
        return [error("filter", str(failure), "mend rollout.filter")]
    if not samples:
        return [skipped("filter", f"{path} is imported; there is no sample to judge")]
    try:
        verdict = judge(samples)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # as in a run
        text = str(failed("filter", raised))
        return [error("filter", text, "fix the function; a group whose filter fails is not trained")]
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return [ok("filter", f"{path} is imported; a group of the first prompt is {verdict.outcome}{reason}")]


def generate(config: Config) -> list[Outcome]:
    """Import it; it is not called."""
    path = config.rollout.generate
    if path is None:
        return []
    try:
        function = resolve(path, option="rollout.generate")
    except ConfigError as failure:
        return [error("generate", str(failure), "mend rollout.generate")]
    if not inspect.iscoroutinefunction(function):
        text = f"rollout.generate = {path!r} must be an async function, found {function!r}"
        return [error("generate", text, "write `async def generate(context, sample, sampling_params)`")]
    return [ok("generate", f"{path} is imported (and not called here)")]


def _parts(parts: dict[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.3g} ms"
