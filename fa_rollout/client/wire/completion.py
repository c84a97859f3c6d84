"""What an engine's answer to one request becomes.

R: output tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, true to the server: its ids, its log-probabilities, its versions."""

    output_ids: npt.NDArray[np.int32]
    """[R] The server's token ids, the stop token included."""
    logprobs: npt.NDArray[np.float32]
    """[R] Finite, not positive."""
    finish: str
    """`stop`, `length` or `abort`; an abort is a normal answer, often with no tokens."""
    matched: int | str | None = None
    """The stop token id or stop text that ended it."""
    versions: tuple[tuple[str | None, int], ...]
    """(label, end) spans that cover the output tokens; a label is None where the engine tells none."""
    has_spans: bool
    """False: the engine tells one label for the whole answer, at the time it was reported."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    e2e_latency_s: float | None = None
    engine: str = ""
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """`routed_experts` int32 [T - 1, layers * experts per token], when it was asked for."""
    rest: bytes = b""
    """The whole answer's JSON, where a 0 may stand for each of its two long lists; for who needs its text, or
    what else an engine tells."""


def empty_abort(engine: str = "") -> Completion:
    """The answer for a request that was aborted before any engine had it."""
    return Completion(
        output_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        finish="abort",
        versions=(),
        has_spans=False,
        engine=engine,
    )
