"""What the keys of a configuration ask of one another, checked before anything starts.

In: a configuration whose values are right one by one. Out: nothing, or a `ConfigError` that names the keys.
Invariant: what is known from the configuration alone is refused here, and not when a run comes to it.
"""

from collections.abc import Iterable

from fa_rollout.config.errors import ConfigError
from fa_rollout.config.sections import Config, Data, Engine, Launch, Rollout, Sampling
from trainer_hook.record import COLUMNS, ExtraColumn


def check(config: Config) -> None:
    """All of it.

    Raises:
        ConfigError: two keys contradict each other.
    """
    _check_engines(config.engine, config.launch)
    _check_shards(config)
    check_sampling(config.sampling, "sampling")
    _check_template(config.data)
    _check_agent(config.rollout)
    _check_batch(config)
    _check_times(config)
    _check_columns(config.record.columns)


RESERVED_TEMPLATE_NAMES = ("messages", "tools", "add_generation_prompt")
"""Variables of a chat template that are filled in for each prompt."""


def reserved_template_name(values: Iterable[str]) -> str | None:
    """The first of these names that would hide what a chat template is given for each prompt."""
    return next((name for name in values if name in RESERVED_TEMPLATE_NAMES), None)


def _check_template(data: Data) -> None:
    if reserved := reserved_template_name(data.chat_template_kwargs):
        raise ConfigError(
            f"data.chat_template_kwargs must not contain {reserved!r}, which is filled in for each prompt"
        )
    used = data.chat_template_kwargs or data.chat_template_kwargs_key
    if data.chat_template is False and used:
        raise ConfigError(
            "data.chat_template_kwargs and data.chat_template_kwargs_key need the chat template, found "
            "data.chat_template = false; leave one of them out"
        )


def _check_agent(rollout: Rollout) -> None:
    """One thing makes samples."""
    makers = {"generate": rollout.generate, "agent": rollout.agent, "agent_command": rollout.agent_command}
    given = [f"rollout.{name}" for name, value in makers.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"only one of {', '.join(given)} may be given, found {len(given)}")
    if rollout.agent_command == []:
        raise ConfigError("rollout.agent_command must hold the words of a command line, found none")


def check_sampling(sampling: Sampling, section: str) -> None:
    """What engines refuse for every prompt.

    Raises:
        ConfigError: a value is of that kind.
    """
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise ConfigError(f"{section}.top_k must be 1 or more, or -1 for all tokens, found {sampling.top_k}")
    if "" in sampling.stop:
        raise ConfigError(f"{section}.stop must hold no empty string: every answer would end at once")
    if any(ident < 0 for ident in sampling.stop_token_ids):
        raise ConfigError(
            f"{section}.stop_token_ids must be token ids, 0 or more, found {min(sampling.stop_token_ids)}"
        )


def _check_engines(engine: Engine, launch: Launch) -> None:
    if not engine.urls and engine.model is None and launch.command is None:
        raise ConfigError("engine.urls or engine.model must be given: there is nothing to sample from")
    if launch.server == "embedded" and launch.command is not None:
        raise ConfigError('launch.command goes with launch.server = "sglang", found "embedded"')
    if engine.router and len(engine.urls) > 1:
        raise ConfigError(
            f"engine.router needs one address in engine.urls, the router's, found {len(engine.urls)}"
        )
    needed = launch.number * launch.gpus_per_engine
    if launch.gpus is not None and len(launch.gpus) < needed:
        found = f"{len(launch.gpus)} for {launch.number} x {launch.gpus_per_engine}"
        raise ConfigError(f"launch.gpus must have launch.gpus_per_engine devices an engine, found {found}")


def _check_shards(config: Config) -> None:
    data = config.data
    if data.shard >= data.num_shards:
        raise ConfigError(
            f"data.shard must be below data.num_shards, found {data.shard} of {data.num_shards} "
            "(--shard I/N sets both)"
        )
    if config.engine.shared and (not config.engine.urls or data.num_shards == 1):
        raise ConfigError(
            "engine.shared needs engine.urls, the same on every node, and data.shard of data.num_shards "
            f"(--shard I/N); found {len(config.engine.urls)} urls and {data.num_shards} shards"
        )


def _check_batch(config: Config) -> None:
    """A step that cannot be shared out, and a prompt that leaves no room for its answer."""
    rollout, trainer = config.rollout, config.trainer
    num_samples = rollout.groups_per_step * rollout.samples_per_group
    is_fixed = not rollout.is_custom  # a custom one may make several samples of each
    if is_fixed and trainer.num_ranks is not None and num_samples < trainer.num_ranks:
        raise ConfigError(
            f"a step must have a sample for each of trainer.num_ranks = {trainer.num_ranks} ranks, found "
            f"{num_samples} "
            f"(rollout.groups_per_step = {rollout.groups_per_step} x rollout.samples_per_group = "
            f"{rollout.samples_per_group})"
        )
    limit = trainer.max_tokens_per_micro_batch
    if limit is not None and limit < 2:
        raise ConfigError(
            f"trainer.max_tokens_per_micro_batch must hold a prompt and an answer, found {limit}"
        )


def _check_times(config: Config) -> None:
    if config.metrics.interval_s < 0.1:
        raise ConfigError(f"metrics.interval_s must be 0.1 s or more, found {config.metrics.interval_s:g}")
    ring = config.ring
    if ring.lease_deadline_s < ring.lease_warning_s:
        raise ConfigError(
            f"ring.lease_deadline_s must not come before ring.lease_warning_s, found "
            f"{ring.lease_deadline_s:g} s and {ring.lease_warning_s:g} s"
        )


def _check_columns(columns: list[ExtraColumn]) -> None:
    taken = {column.name for column in COLUMNS}
    for column in columns:
        if column.name in taken or column.name.startswith("cu_"):
            raise ConfigError(
                f"record.columns must name each column once, and none like those of every record, found "
                f"{column.name!r}"
            )
        taken.add(column.name)
