"""The one typed configuration of a run: its tables (`sections`), read and checked whole (`reading`)."""

from fa_rollout.config.reading import (
    ConfigError,
    from_dict,
    load,
    reserved_template_name,
    sampling_with,
    to_dict,
)
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
    "from_dict",
    "load",
    "reserved_template_name",
    "sampling_with",
    "to_dict",
]
