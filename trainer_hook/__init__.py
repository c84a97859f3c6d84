"""The trainer's side of fa_rollout, and the contract between processes: record schema and messages.

    from trainer_hook import TrainerHook

    hook = TrainerHook.attach()

Errors are imported eagerly, everything else on first use. torch is imported when the first tensor is created.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shm.errors import AttachTimeout, DescriptorRefused, FaRolloutError, HandshakeRefused
from trainer_hook.errors import (
    EndOfData,
    EvaluationFailed,
    GeneratorFailed,
    HookError,
    HookStateError,
    HubLost,
    PeerLost,
    PublishFailed,
    StaleView,
    Stalled,
    UnsplittableBatch,
    WeightUpdateFailed,
)

if TYPE_CHECKING:
    from trainer_hook.batches.batch import Batch, MicroBatch
    from trainer_hook.batches.sample import Sample, SampleArrays
    from trainer_hook.calls.evaluating import PendingEvaluation
    from trainer_hook.calls.evaluation import EvaluatedPrompt, EvaluatedSample, Evaluation
    from trainer_hook.calls.update import WeightUpdate
    from trainer_hook.hook import TrainerHook
    from trainer_hook.record import UNKNOWN_VERSION, SamplingSpan, TokenSampling, VersionSpan
    from trainer_hook.session.statistics import HookStatistics, RunShape

_HOME_OF = {
    "Batch": "trainer_hook.batches.batch",
    "EvaluatedPrompt": "trainer_hook.calls.evaluation",
    "EvaluatedSample": "trainer_hook.calls.evaluation",
    "Evaluation": "trainer_hook.calls.evaluation",
    "MicroBatch": "trainer_hook.batches.batch",
    "TrainerHook": "trainer_hook.hook",
    "UNKNOWN_VERSION": "trainer_hook.record",
    "Sample": "trainer_hook.batches.sample",
    "SampleArrays": "trainer_hook.batches.sample",
    "SamplingSpan": "trainer_hook.record",
    "TokenSampling": "trainer_hook.record",
    "VersionSpan": "trainer_hook.record",
    "HookStatistics": "trainer_hook.session.statistics",
    "PendingEvaluation": "trainer_hook.calls.evaluating",
    "RunShape": "trainer_hook.session.statistics",
    "WeightUpdate": "trainer_hook.calls.update",
}

__all__ = [
    "UNKNOWN_VERSION",
    "AttachTimeout",
    "Batch",
    "DescriptorRefused",
    "EndOfData",
    "EvaluatedPrompt",
    "EvaluatedSample",
    "Evaluation",
    "EvaluationFailed",
    "FaRolloutError",
    "GeneratorFailed",
    "HandshakeRefused",
    "HookError",
    "HookStateError",
    "HookStatistics",
    "HubLost",
    "MicroBatch",
    "PeerLost",
    "PendingEvaluation",
    "PublishFailed",
    "RunShape",
    "Sample",
    "SampleArrays",
    "SamplingSpan",
    "StaleView",
    "Stalled",
    "TokenSampling",
    "TrainerHook",
    "UnsplittableBatch",
    "VersionSpan",
    "WeightUpdate",
    "WeightUpdateFailed",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
