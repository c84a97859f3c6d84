"""The user's code: imported and called where a run would call it."""

import inspect
import time
from collections.abc import Sequence

from fa_rollout.config import Config, ConfigError
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.doctor.outcome import CheckOutcome, error, ok, skipped, warning
from fa_rollout.filters import GroupFilter
from fa_rollout.generator.agents.rendering import Rendering
from fa_rollout.rewards.outcomes import RewardFailed, RewardOutcome, RewardsLost
from fa_rollout.rewards.runner import RewardRunner
from fa_rollout.sample import Sample
from fa_rollout.user_code.dotted import is_url, resolve
from fa_rollout.user_code.failure import failed

_PATIENCE_S = 5.0
"""Longest wait for a reward server."""
_LOOP_S = 0.001
"""A plain function that takes longer does not belong in the event loop."""


async def reward(config: Config, samples: list[Sample]) -> list[CheckOutcome]:
    """Import it and score a group of samples in its worker process, within its time limit."""
    runner = RewardRunner(config.reward, patience_s=_PATIENCE_S)
    name = config.reward.function
    try:
        await runner.start()
        if not samples:
            return [skipped("reward", f"{name} imported; not called, because no prompt could be encoded")]
        await runner.score(samples)  # the first call pays for imports
        began_s = time.monotonic()
        found = await runner.score(samples)
        each_s = (time.monotonic() - began_s) / (1 if config.reward.group else len(samples))
    except (ConfigError, RewardsLost) as failure:
        return [
            error(
                "reward", str(failure), "fix reward.function; `python -c 'import ...'` shows the same error"
            )
        ]
    finally:
        await runner.aclose()
    return [_judged(config, name, found, each_s)]


def _judged(config: Config, name: str, found: Sequence[RewardOutcome], each_s: float) -> CheckOutcome:
    failed = next((one for one in found if isinstance(one, RewardFailed)), None)
    if failed is not None:
        text = f"{name} failed to score a sample ({failed.reason}): {failed.text}"
        return error("reward", text, "fix the function; groups whose reward fails are not trained")
    values = [f"{one.value:g}{_parts(one.parts)}" for one in found if not isinstance(one, RewardFailed)]
    alike = f"{values[0]} for each of {len(values)} samples" if len(set(values)) == 1 < len(values) else ""
    text = f"{name} returned {alike or ', '.join(values)}; {_ms(each_s)} per call"
    where = "in the event loop" if config.reward.in_loop else f"{config.reward.num_workers} workers"
    if config.reward.in_loop and each_s > _LOOP_S:
        fix = "set reward.in_loop = false: all requests to all engines wait while it runs"
        return warning("reward", f"{text}, in the event loop", fix)
    return ok("reward", f"{text}, {'called over HTTP' if is_url(name) else where}")


def group_filter(config: Config, samples: list[Sample]) -> list[CheckOutcome]:
    """Import it and apply it to a group."""
    path = config.rollout.filter
    if path is None:
        return []
    try:
        judge = GroupFilter.load(path)
    except ConfigError as failure:
        return [error("filter", str(failure), "fix rollout.filter")]
    if not samples:
        return [skipped("filter", f"{path} imported; not called, because there is no sample")]
    try:
        verdict = judge(samples)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # as in a run
        text = str(failed("filter", raised))
        return [error("filter", text, "fix the function; groups whose filter fails are not trained")]
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return [ok("filter", f"{path} imported; the group of the first prompt is {verdict.outcome}{reason}")]


def generate(config: Config) -> list[CheckOutcome]:
    """Import it; it is not called."""
    path = config.rollout.generate
    if path is None:
        return []
    try:
        function = resolve(path, option="rollout.generate")
    except ConfigError as failure:
        return [error("generate", str(failure), "fix rollout.generate")]
    if not inspect.iscoroutinefunction(function):
        text = f"rollout.generate = {path!r} must be an async function, found {function!r}"
        return [error("generate", text, "write `async def generate(context, sample, sampling_params)`")]
    return [ok("generate", f"{path} imported (not called here)")]


def agent(config: Config, tokenizer: Tokenizer | None) -> list[CheckOutcome]:
    """Import it without calling it, and test whether the chat template can be extended turn by turn."""
    if not config.rollout.has_agent:
        return []
    found = []
    if (path := config.rollout.agent) is not None:
        try:
            resolve(path, option="rollout.agent")
            found = [ok("agent", f"{path} imported (not called here)")]
        except ConfigError as failure:
            found = [error("agent", str(failure), "fix rollout.agent")]
    if tokenizer is None:
        return found
    try:
        extension = Rendering(tokenizer, config.data.chat_template_kwargs).extension
    except ConfigError as failure:
        return [*found, error("agent", str(failure), "agents need a tokenizer with a chat template")]
    if not extension.reason:
        return [*found, ok("agent", "the chat template only appends: a conversation is one sample")]
    text = f"the chat template does not only append ({extension.reason}): such turns start a new sample"
    return [
        *found,
        warning("agent", text, "training works, with more and longer samples; see docs/agents.md"),
    ]


def _parts(parts: dict[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.3g} ms"
