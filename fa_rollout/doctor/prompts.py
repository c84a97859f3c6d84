"""The data, read and encoded as a run would read and encode it.

T: tokens of a prompt.
"""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fa_rollout.config import Config, ConfigError
from fa_rollout.data.chat import PromptError
from fa_rollout.data.order import epoch_order
from fa_rollout.data.prompts import PromptSource
from fa_rollout.data.row import Row, listed
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.doctor.outcome import CheckOutcome, error, ok, warning

NUM_SHOWN = 3
_SCAN_S = 10.0
"""Longest time to spend on counting prompts."""
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPrompt:
    """A row and its tokens, as they will be sent."""

    index: int
    row: Row
    ids: npt.NDArray[np.int32]
    """[T]"""


def data(config: Config) -> tuple[list[CheckOutcome], PromptSource | None]:
    """Open the data and check every row."""
    try:
        source = PromptSource.open(config.data)
    except ConfigError as found:
        return [error("data", str(found), "fix the file or the keys of [data]")], None
    needed = config.rollout.num_steps * config.rollout.groups_per_step
    mine = -(-(len(source) - config.data.shard) // config.data.num_shards)
    text = f"{len(source):,} rows in {config.data.path}; the run trains {needed:,} groups"
    if mine < needed and config.data.epochs is not None:
        ends = f"{text}, but the data ends after {mine * config.data.epochs:,}"
        if mine * config.data.epochs < needed:
            return [
                warning("data", ends, "raise data.epochs, or remove it to repeat the data as needed")
            ], source
    if source.num_skipped_rows:
        left = f"{text}; {source.num_skipped_rows:,} bad rows are skipped"
        return [warning("data", left, 'set data.on_bad_row = "error" to see the first one')], source
    return [ok("data", text)], source


def prompts(
    config: Config, source: PromptSource, tokenizer: Tokenizer, context_length: int | None
) -> tuple[list[CheckOutcome], list[TriedPrompt]]:
    """Encode them in the order in which they will be sent, and show the first as an engine sees them."""
    order = epoch_order(len(source), 0, seed=config.data.seed, shuffle=config.data.shuffle)
    order = order[config.data.shard :: config.data.num_shards]
    first: list[TriedPrompt] = []
    lengths: list[int] = []
    refused: list[str] = []
    deadline_s = time.monotonic() + _SCAN_S
    for index in order.tolist():
        if time.monotonic() > deadline_s:
            break
        row = source.row(index)
        try:
            ids = tokenizer.encode_prompt(row, chat_template=config.data.chat_template)
        except PromptError as found:
            refused.append(f"row {index}: {found}")
            continue
        except ConfigError as found:
            fix = "use text prompts, or a tokenizer with a chat template"
            return [error("prompts", str(found), fix)], []
        lengths.append(len(ids))
        if len(first) < NUM_SHOWN:
            first.append(TriedPrompt(index=index, row=row, ids=ids))
    counted = "" if len(lengths) + len(refused) == len(order) else f" of the first {len(lengths):,}"
    outcomes = [_lengths(config, np.array(lengths, np.int64), context_length, counted)]
    if refused:
        text = f"{len(refused):,} prompts cannot be encoded and will be recorded as failed"
        outcomes.append(
            warning("prompts", text, "fix them, or remove them from the data", refused[:NUM_SHOWN])
        )
    return [_first(first, tokenizer), *_template(config, first, tokenizer), *outcomes], first


def _template(config: Config, first: list[TriedPrompt], tokenizer: Tokenizer) -> list[CheckOutcome]:
    """Variables that are set for the chat template but that it does not use."""
    names = {*config.data.chat_template_kwargs, *(name for p in first for name in p.row.chat_template_kwargs)}
    if not names:
        return []
    if config.data.chat_template is None and all(isinstance(prompt.row.prompt, str) for prompt in first):
        text = f"{listed(sorted(names))} have no effect: prompts are text, and no chat template is applied"
        return [
            warning(
                "template", text, "set data.chat_template = true, or use lists of chat messages as prompts"
            )
        ]
    if unused := tokenizer.unused_by_template(names):
        text = f"the chat template does not use {listed(unused)} of data.chat_template_kwargs"
        return [warning("template", text, "check the spelling against the tokenizer's chat template")]
    return [ok("template", f"the chat template uses {listed(sorted(names))}")]


def _first(found: list[TriedPrompt], tokenizer: Tokenizer) -> CheckOutcome:
    if not found:
        return error("prompts", "no prompt can be encoded", "see the errors below")
    details = []
    for prompt in found:
        text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        cut = (
            f" ... and {len(text) - _SHOWN_CHARACTERS:,} more characters"
            if len(text) > _SHOWN_CHARACTERS
            else ""
        )
        details.append(f"row {prompt.index}, {len(prompt.ids)} tokens: {text[:_SHOWN_CHARACTERS]!r}{cut}")
        if prompt.row.label is not None:
            details.append(f"    label {str(prompt.row.label)[:_SHOWN_CHARACTERS]!r}")
    return ok("prompts", f"the first {len(found)} prompts as they will be sent", details)


def _lengths(
    config: Config, lengths: npt.NDArray[np.int64], context_length: int | None, counted: str
) -> CheckOutcome:
    """Their lengths, and which are too long."""
    if not len(lengths):
        return error("lengths", "no prompt could be counted", "see the errors above")
    middle, high, most = (int(np.percentile(lengths, q)) for q in (50, 99, 100))
    text = f"tokens per prompt{counted}: median {middle:,}, 99th percentile {high:,}, longest {most:,}"
    limits = {"data.max_prompt_tokens": config.data.max_prompt_tokens}
    micro_batch = config.trainer.max_tokens_per_micro_batch
    limits["trainer.max_tokens_per_micro_batch"] = None if micro_batch is None else micro_batch - 1
    limits["the engines' context"] = None if context_length is None else context_length - 2
    for name, limit in limits.items():
        if limit is not None and most > limit:
            count = int((lengths > limit).sum())
            share = f"{count:,} of {len(lengths):,} prompts ({count / len(lengths):.1%})"
            fix = "remove them from the data, or raise the limit"
            failing = f"{text}; {share} are longer than {name} = {limit:,} and will be recorded as failed"
            if count / len(lengths) > config.rollout.max_failure_rate:
                return error("lengths", f"{failing}, which stops the run (rollout.max_failure_rate)", fix)
            return warning("lengths", failing, fix)
    if context_length is not None and most + config.sampling.max_new_tokens > context_length:
        room = context_length - most
        text += f"; the longest leaves {room:,} tokens for its answer in the context of {context_length:,}"
        return warning(
            "lengths", text, "lower sampling.max_new_tokens, or start the engines with a longer context"
        )
    return ok("lengths", text)
