"""An engine that plays faults, latencies and length traces, for tests and benchmarks; it runs no model."""

from tests.kit.scripted.handle import ScriptedEngine
from tests.kit.scripted.oracle import (
    EOS_ID,
    expected_experts,
    expected_ids,
    expected_kept,
    expected_logprobs,
    ids_of_text,
    sequence_key,
)
from tests.kit.scripted.script import Lengths, Recorded, Rule, Script

__all__ = [
    "EOS_ID",
    "Lengths",
    "Recorded",
    "Rule",
    "Script",
    "ScriptedEngine",
    "expected_experts",
    "expected_ids",
    "expected_kept",
    "expected_logprobs",
    "ids_of_text",
    "sequence_key",
]
