"""The engines: whether they answer, what they are, and what that means for the run."""

from collections.abc import Sequence

from fa_rollout.client.fleet.examine import Examined, Unanswered
from fa_rollout.config import Config
from fa_rollout.doctor.outcome import CheckOutcome, error, ok, warning

_WAYS = {"disk": "files", "tensor": "tensors", "distributed": "broadcast"}
"""`trainer.publish` -> what an engine must support for it."""


def engines(config: Config, found: Sequence[Examined | Unanswered]) -> list[CheckOutcome]:
    """One line per engine, and one for differences between them."""
    outcomes = [_one(config, one) for one in found]
    return outcomes + _agreement([one for one in found if isinstance(one, Examined)])


def _one(config: Config, one: Examined | Unanswered) -> CheckOutcome:
    if isinstance(one, Unanswered):
        fix = "start it, or fix engine.urls; the server may also listen on 127.0.0.1 only"
        return error("engine", one.text, fix)
    info, follows = one.info, config.engine.shared and config.data.shard > 0
    release = f"release {info.server_version}" if info.server_version else "unknown release"
    text = f"{info.url}: {release}, weights {info.version_label!r}, one token in {one.probe_s:.2g} s"
    vocabulary, context = _known(info.vocab_size), _known(info.context_length)
    ways = ", ".join(one.update_ways) or "none"
    details = [
        f"model {info.model_path}, vocabulary {vocabulary}, context {context}",
        f"version spans: {'yes' if info.has_spans else 'no'}; updates by {ways}"
        f"{' (announced by /begin_weight_update)' if one.has_brackets else ''}",
        f"in-flight answers {_meeting(config, info.has_spans)}",
    ]
    if not one.can_pause:
        return error("engine", f"{text}; it cannot be paused", "run SGLang 0.5.15 or newer", details)
    if _WAYS[config.trainer.publish] not in one.update_ways:
        lack = f"{text}; it does not support trainer.publish = {config.trainer.publish!r}"
        return error(
            "engine",
            lack,
            "set trainer.publish to a way that it supports, or run SGLang 0.5.15 or newer",
            details,
        )
    if not info.has_spans and config.engine.pause_mode in ("retract", "in_place"):
        mode = config.engine.pause_mode
        said = (
            f"{text}; under pause_mode = {mode!r} it does not report which weight version sampled each token"
        )
        return warning(
            "engine", said, 'set engine.pause_mode = "auto", or run SGLang 0.5.19 or newer', details
        )
    if not info.is_of_start and not follows:
        said = f"{text}; another run has pushed these weights to it since it started"
        fix = (
            "none needed if that run has ended and the engine can load engine.model or its own folder: the "
            "run loads it first. Otherwise call hook.update_weights() before the first batch, or restart the "
            "engine"
        )
        return warning("engine", said, fix, details)
    return ok("engine", text, details)


def _meeting(config: Config, has_spans: bool) -> str:
    mode = config.engine.pause_mode
    if mode == "auto":
        mode = "retract" if has_spans else "abort"
    after = "continue" if config.rollout.partial == "resume" else "start again"
    return (
        f"pause during an update ({mode}) and then continue"
        if mode != "abort"
        else f"are aborted by an update and then {after}"
    )


def _agreement(found: Sequence[Examined]) -> list[CheckOutcome]:
    """Engines of one run must be the same."""
    models = {one.info.first_path for one in found}
    releases = {one.info.server_version for one in found}
    labels = {one.info.version_label for one in found}
    if len(models) > 1:
        text = f"all engines must serve the same model, found {', '.join(sorted(map(str, models)))}"
        # Their first answers to a run's first prompts would be of different policies.
        return [warning("engines", text, "start them all with the same --model-path")]
    if len(releases) > 1 or len(labels) > 1:
        what = releases if len(releases) > 1 else labels
        text = f"engines differ: {', '.join(sorted(map(str, what)))}"
        return [
            warning(
                "engines", text, "start them all the same way; the run itself brings weights to one version"
            )
        ]
    return []


def _known(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
