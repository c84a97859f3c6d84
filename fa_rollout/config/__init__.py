"""The one typed configuration of a run: its tables (`sections`), read and checked whole (`reading`)."""

from fa_rollout.config.checks import reserved_template_name
from fa_rollout.config.errors import ConfigError
from fa_rollout.config.reading import checked, from_dict, load, sampling_with, to_dict, to_shown_dict, to_toml
from fa_rollout.config.sections import Config, Data, Evaluation, Metrics, Reward, Run, Sampling

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Evaluation",
    "Metrics",
    "Reward",
    "Run",
    "Sampling",
    "checked",
    "from_dict",
    "load",
    "reserved_template_name",
    "sampling_with",
    "to_dict",
    "to_shown_dict",
    "to_toml",
]
