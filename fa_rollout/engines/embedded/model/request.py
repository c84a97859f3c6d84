"""One completion on its way through the engine.

Made by the HTTP side, then owned by the engine's thread until its last event; the HTTP side only reads what
an event's token count covers, and lists only grow, so no lock is needed.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tokenizers import Tokenizer

from fa_rollout.engines.embedded.model.incremental_text import IncrementalText
from fa_rollout.engines.embedded.model.logit_adjuster import LogitAdjuster
from fa_rollout.engines.embedded.model.sampling_params import SamplingParams

TopEntries = list[tuple[float, int]]


class FinishKind(StrEnum):
    """SGLang's `finish_reason.type`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a request ended."""

    kind: FinishKind
    matched: int | str | None = None
    message: str | None = None
    was_waiting: bool = False
    """Aborted while it held no KV cache; SGLang's reply is then shorter."""
    status_code: int | None = None


class StopStrings:
    """Finds the first stop string in text that grows token by token."""

    __slots__ = ("_incremental", "_longest", "_strings", "_tail")

    def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._strings = strings
        self._longest = max(map(len, strings))
        self._incremental = IncrementalText(tokenizer, skip_special_tokens=skip_special_tokens)
        self._tail = ""

    def match(self, token_id: int) -> str | None:
        """Take the next token; the stop string that it completes, if any."""
        piece = self._incremental.push(token_id)
        if not piece:
            return None
        window = self._tail + piece
        self._tail = window[-self._longest :]
        return next((text for text in self._strings if text in window), None)


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One completion: what was asked, and what has been sampled so far."""

    rid: str
    prompt_ids: list[int]
    """[P], at least one."""
    params: SamplingParams
    max_new_tokens: int
    seed: int
    """64-bit key of this request's random numbers."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    adjuster: LogitAdjuster | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int | None = None
    """Prompt position from which prompt log-probs are wanted."""
    num_top: int = 0
    return_text_in_logprobs: bool = False
    arrived_s: float = 0.0

    temperature: float = field(init=False)
    is_greedy: bool = field(init=False)
    is_truncated: bool = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    """[R]"""
    output_logprobs: list[float] = field(default_factory=list)
    """[R]"""
    output_top: list[TopEntries] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    """[P - logprob_start - 1] of prompt_ids[logprob_start + 1 :]."""
    input_top: list[TopEntries] = field(default_factory=list)
    version_marks: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, first output token that it sampled)"""
    num_retractions: int = 0
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        # Read for every token of every row: plain attributes
        self.temperature = self.params.logprob_temperature
        self.is_greedy = self.params.is_greedy
        self.is_truncated = self.params.is_truncated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Length of the sequence if nothing stops it early."""
        return len(self.prompt_ids) + self.max_new_tokens

    def accept(self, token_id: int, logprob: float) -> None:
        """Append a sampled token; a stop string beats a stop token, which beats the length, as in SGLang."""
        self.output_ids.append(token_id)
        self.output_logprobs.append(logprob)
        if self.adjuster is not None:
            self.adjuster.observe(token_id)
        matched = self.stop_strings.match(token_id) if self.stop_strings is not None else None
        if matched is not None:
            self.finish = FinishReason(kind=FinishKind.STOP, matched=matched)
        elif token_id in self.stop_ids:
            self.finish = FinishReason(kind=FinishKind.STOP, matched=token_id)
        elif len(self.output_ids) >= self.max_new_tokens:
            self.finish = FinishReason(kind=FinishKind.LENGTH)

    def mark_version(self, version: str) -> None:
        """Tokens from here on are sampled by `version`."""
        num_output = len(self.output_ids)
        if self.version_marks and self.version_marks[-1][1] == num_output:
            self.version_marks.pop()
        if not self.version_marks or self.version_marks[-1][0] != version:
            self.version_marks.append((version, num_output))

    def version_spans(self, num_output: int) -> list[dict[str, Any]]:
        """Half-open spans over the first `num_output` tokens."""
        marks = [mark for mark in self.version_marks if mark[1] < num_output]
        ends = [start for _, start in marks[1:]] + [num_output]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(marks, ends, strict=False)
        ]
