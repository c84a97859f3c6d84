"""Fully asynchronous rollouts: generator, hub, launcher, engines, slime plug-in.

slime finds its plug-ins here by name: `--rollout-function-path fa_rollout.entry` and, if wanted,
`--custom-convert-samples-to-train-data-path fa_rollout.convert_samples_to_train_data`.
"""

from typing import Any


def entry(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's rollout function; see docs/slime.md."""
    from fa_rollout.slime.manager.rollout import rollout

    return rollout(args, rollout_id, data_source, evaluation=evaluation)


def convert_samples_to_train_data(args: Any, samples: list[Any]) -> dict[str, Any]:
    """slime's conversion of samples to train data, with tensors that slime takes over without a copy."""
    from fa_rollout.slime.manager.convert import convert

    return convert(args, samples)
