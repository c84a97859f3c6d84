"""The data: read as a run reads it, encoded as a run sends it.

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
from fa_rollout.doctor.outcome import Outcome, error, ok, warning

NUM_SHOWN = 3
_SCAN_S = 10.0
"""Longest time that prompts are counted for."""
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row and its tokens, as they will be sent."""

    index: int
    row: Row
    ids: npt.NDArray[np.int32]
    """[T]"""


def data(config: Config) -> tuple[list[Outcome], PromptSource | None]:
    """Find and check every row."""
    try:
        source = PromptSource.open(config.data)
    except ConfigError as found:
        return [error("data", str(found), "mend the file or the keys of [data]")], None
    needed = config.rollout.num_steps * config.rollout.groups_per_step
    mine = -(-(len(source) - config.data.shard) // config.data.num_shards)
    text = f"{len(source):,} rows in {config.data.path}; the run trains {needed:,} groups"
    if mine < needed and config.data.epochs is not None:
        ends = f"{text}, and its data ends after {mine * config.data.epochs:,}"
        if mine * config.data.epochs < needed:
            return [warning("data", ends, "raise data.epochs, or leave it out to wrap around")], source
    if source.num_skipped_rows:
        left = f"{text}; {source.num_skipped_rows:,} bad rows are left out"
        return [warning("data", left, 'data.on_bad_row = "error" names the first of them')], source
    return [ok("data", text)], source


def prompts(
    config: Config, source: PromptSource, tokenizer: Tokenizer, context_length: int | None
) -> tuple[list[Outcome], list[Prompt]]:
    """Encode them in the order in which they will be sent; the first are shown as an engine sees them."""
    order = epoch_order(len(source), 0, seed=config.data.seed, shuffle=config.data.shuffle)
    order = order[config.data.shard :: config.data.num_shards]
    first: list[Prompt] = []
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
            fix = "give prompts as text, or a tokenizer with a chat template"
            return [error("prompts", str(found), fix)], []
        lengths.append(len(ids))
        if len(first) < NUM_SHOWN:
            first.append(Prompt(index=index, row=row, ids=ids))
    counted = "" if len(lengths) + len(refused) == len(order) else f" of the first {len(lengths):,}"
    outcomes = [_lengths(config, np.array(lengths, np.int64), context_length, counted)]
    if refused:
        text = f"{len(refused):,} prompts cannot be encoded and will be recorded as failed"
        outcomes.append(warning("prompts", text, "mend them, or leave them out", refused[:NUM_SHOWN]))
    return [_first(first, tokenizer), *_template(config, first, tokenizer), *outcomes], first


def _template(config: Config, first: list[Prompt], tokenizer: Tokenizer) -> list[Outcome]:
    """Variables that the chat template is given and does not use."""
    names = {*config.data.chat_template_kwargs, *(name for p in first for name in p.row.chat_template_kwargs)}
    if not names:
        return []
    if config.data.chat_template is None and all(isinstance(prompt.row.prompt, str) for prompt in first):
        text = f"{listed(sorted(names))} have no effect: prompts are text, and no chat template is applied"
        return [warning("template", text, "set data.chat_template = true, or give prompts as chat messages")]
    if unused := tokenizer.unused_by_template(names):
        text = f"the chat template does not use {listed(unused)} of data.chat_template_kwargs"
        return [warning("template", text, "check the spelling against the tokenizer's chat template")]
    return [ok("template", f"the chat template uses {listed(sorted(names))}")]


def _first(found: list[Prompt], tokenizer: Tokenizer) -> Outcome:
    if not found:
        return error("prompts", "no prompt can be encoded", "see the reasons below")
    details = []
    for prompt in found:
        text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        cut = (
            f" ... and {len(text) - _SHOWN_CHARACTERS:,} characters" if len(text) > _SHOWN_CHARACTERS else ""
        )
        details.append(f"row {prompt.index}, {len(prompt.ids)} tokens: {text[:_SHOWN_CHARACTERS]!r}{cut}")
        if prompt.row.label is not None:
            details.append(f"    label {str(prompt.row.label)[:_SHOWN_CHARACTERS]!r}")
    return ok("prompts", f"the first {len(found)}, as they will be sent", details)


def _lengths(
    config: Config, lengths: npt.NDArray[np.int64], context_length: int | None, counted: str
) -> Outcome:
    """How long they are, and what is too long."""
    if not len(lengths):
        return error("lengths", "no prompt could be counted", "see the reasons above")
    middle, high, most = (int(np.percentile(lengths, q)) for q in (50, 99, 100))
    text = f"tokens{counted}: {middle:,} in the middle, {high:,} at 99 %, {most:,} at most"
    limits = {"data.max_prompt_tokens": config.data.max_prompt_tokens}
    micro_batch = config.trainer.max_tokens_per_micro_batch
    limits["trainer.max_tokens_per_micro_batch"] = None if micro_batch is None else micro_batch - 1
    limits["the engines' context"] = None if context_length is None else context_length - 2
    for name, limit in limits.items():
        if limit is not None and most > limit:
            count = int((lengths > limit).sum())
            share = f"{count:,} of {len(lengths):,} prompts ({count / len(lengths):.1%})"
            fix = "leave them out of the data, or raise the limit"
            failing = f"{text}; {share} are longer than {name} = {limit:,} and will be recorded as failed"
            if count / len(lengths) > config.rollout.max_failure_rate:
                return error("lengths", f"{failing}, which stops the run (rollout.max_failure_rate)", fix)
            return warning("lengths", failing, fix)
    if context_length is not None and most + config.sampling.max_new_tokens > context_length:
        room = context_length - most
        text += (
            f"; beside the longest, {room:,} of sampling.max_new_tokens fit the context of {context_length:,}"
        )
        return warning("lengths", text, "lower sampling.max_new_tokens, or give engines a longer context")
    return ok("lengths", text)
