"""Results of an evaluation: samples with rewards, by prompt. They never enter training.

Shapes: L tokens of prompt and response, r response tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer_hook.messages import EvaluationOrder, EvaluationPrompt
from trainer_hook.record import UNKNOWN_VERSION

Prompt = str | list[dict[str, Any]]


class EvaluatedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    member: int
    raw_tokens: bytes
    prompt_length: int
    raw_logprobs: bytes
    raw_loss_mask: bytes
    version_spans: list[tuple[int, int]]
    """(version, end) over response tokens, as in training samples."""
    response: str
    finish_reason: str
    reward: float
    reward_parts: dict[str, float] = {}
    metadata: dict[str, Any] = {}

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[L] prompt and response, token ids of the engine"""
        return np.frombuffer(self.raw_tokens, "<i4")

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """[r]"""
        return np.frombuffer(self.raw_logprobs, "<f4")

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """[r] 1 for sampled tokens, 0 for tool output"""
        return np.frombuffer(self.raw_loss_mask, np.uint8)

    @property
    def response_length(self) -> int:
        return len(self.raw_loss_mask)


class EvaluatedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its samples, or the reason for having none."""

    index: int
    """Row of the data set, or index in the list of prompts."""
    prompt: Prompt
    label: Any
    samples: list[EvaluatedSample] = []
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A whole evaluation."""

    prompts: tuple[EvaluatedPrompt, ...]
    """Every prompt once, in data order."""

    @property
    def samples(self) -> tuple[EvaluatedSample, ...]:
        """Samples of all prompts that did not fail."""
        return tuple(sample for prompt in self.prompts for sample in prompt.samples)

    @property
    def num_failed(self) -> int:
        """Number of prompts without samples; means leave them out."""
        return sum(prompt.failure is not None for prompt in self.prompts)

    @property
    def reward_mean(self) -> float:
        """Over all samples; NaN if there are none."""
        samples = self.samples
        return sum(sample.reward for sample in samples) / len(samples) if samples else float("nan")

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of the tokens, oldest first; -1 if an engine reported none."""
        return tuple(sorted({version for sample in self.samples for version, _ in sample.version_spans}))

    @property
    def version(self) -> int | None:
        """The weight version of all samples; None if mixed or unknown."""
        return None if self.is_mixed or not self.versions else self.versions[0]

    @property
    def is_mixed(self) -> bool:
        """Whether there is more than one version, or an unknown one: an update happened while it ran."""
        return len(self.versions) > 1 or UNKNOWN_VERSION in self.versions


def order_of(
    source: str | Sequence[Prompt | dict[str, Any]] | None,
    *,
    samples_per_prompt: int | None,
    sampling: dict[str, Any] | None,
) -> EvaluationOrder:
    """The arguments of `TrainerHook.evaluate`, as a message to the generator.

    Raises:
        ValueError: a prompt is neither text, nor messages, nor a dict with a `prompt`.
    """
    if samples_per_prompt is not None and samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt must be 1 or more, found {samples_per_prompt}")
    return EvaluationOrder(
        prompts=None if source is None or isinstance(source, str) else _prompts(source),
        dataset=source if isinstance(source, str) else None,
        samples_per_prompt=samples_per_prompt,
        sampling=sampling or {},
    )


def _prompt(number: int, given: Any) -> EvaluationPrompt:
    try:
        return msgspec.convert(given if isinstance(given, dict) else {"prompt": given}, EvaluationPrompt)
    except msgspec.ValidationError:
        found = f"a dict of {', '.join(map(str, given))}" if isinstance(given, dict) else f"{given!r:.60}"
        raise ValueError(
            "each prompt of an evaluation must be text, chat messages, or a dict of prompt, label and "
            f"metadata; number {number} is {found}"
        ) from None


def _prompts(given: Iterable[Prompt | dict[str, Any]]) -> list[EvaluationPrompt]:
    prompts = [_prompt(number, row) for number, row in enumerate(given)]
    if not all(prompt.prompt for prompt in prompts) or not prompts:
        raise ValueError(
            "an evaluation must have at least one prompt and no empty prompt; found "
            f"{len(prompts)} prompts, {sum(not prompt.prompt for prompt in prompts)} of them empty: "
            "remove empty prompts"
        )
    return prompts
