"""Samples on a terminal: a line of facts, the prompt, the answer with its masks and versions marked.

In: samples, a tokenizer. Out: what `rich` prints. Invariant: nothing is told by colour alone: masked text
stands in ⟦ ⟧, a new weight version begins at ‹v3›.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from fa_rollout.records.samples import Fate, KeptSample
from fa_rollout.records.text import Decodes, Piece, pieces, prompt_text
from trainer_hook.printable import printable

_FATE_STYLES = {Fate.TRAINED: "green", Fate.FAILED: "red", Fate.FILTERED: "yellow", Fate.DROPPED: "yellow"}
_HEAD, _TAIL = 600, 900
"""Characters that are shown of each end of a long text."""


def show(console: Console, samples: Iterable[KeptSample], tokenizer: Decodes, *, is_full: bool) -> None:
    """Print samples, one below the other."""
    for sample in samples:
        console.rule(_title(sample), align="left", style="dim")
        console.print(_facts(sample), soft_wrap=False)
        if sample.reason:
            console.print(
                Text(
                    f"why: {printable(sample.reason, lines=True)}",
                    style="red" if sample.fate is Fate.FAILED else "yellow",
                )
            )
        if len(sample.prompt_ids):
            _block(
                console, "prompt", _cut(Text(_shown(prompt_text(sample, tokenizer)), style="cyan"), is_full)
            )
        if sample.member is not None:
            _block(console, "answer", _cut(_answer(pieces(sample, tokenizer)), is_full))
        if sample.label is not None:
            _block(console, "label", _cut(Text(_shown(str(sample.label))), is_full))
        console.print()


def as_json(sample: KeptSample, tokenizer: Decodes) -> dict[str, Any]:
    """Everything of a sample, as plain data."""
    return {
        "group": sample.group,
        "attempt": sample.attempt,
        "member": sample.member,
        "prompt_index": sample.prompt_index,
        "fate": str(sample.fate),
        "reason": sample.reason,
        "step": sample.step,
        "version": sample.version,
        "staleness": sample.staleness,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "finish_reason": sample.finish_reason,
        "duration_s": sample.duration_s,
        "label": sample.label,
        "prompt": prompt_text(sample, tokenizer) if len(sample.prompt_ids) else "",
        "response": "".join(piece.text for piece in pieces(sample, tokenizer)),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "masked_spans": sample.masked_spans,
        "version_spans": sample.version_spans,
    }


def _title(sample: KeptSample) -> Text:
    member = "" if sample.member is None else f" · sample {sample.member}"
    attempt = f" · attempt {sample.attempt}" if sample.attempt else ""
    style = f"bold {_FATE_STYLES.get(sample.fate, 'cyan')}"
    return Text.assemble((f"group {sample.group}{member}{attempt}", "bold"), "  ", (str(sample.fate), style))


def _facts(sample: KeptSample) -> Text:
    facts: list[str] = []
    if sample.reward is not None:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
        facts.append(f"reward {sample.reward:.4g}" + (f" ({parts})" if parts else ""))
    if sample.step is not None:
        facts.append(f"step {sample.step} by version {sample.version}")
    if sample.staleness is not None:
        facts.append(f"staleness {sample.staleness}")
    if sample.member is not None:
        masked = sum(b - a for a, b in sample.masked_spans)
        facts.append(f"{len(sample.prompt_ids)} + {len(sample.response_ids)} tokens")
        if masked:
            facts.append(f"{masked} masked")
        facts.append(f"ended by {sample.finish_reason}")
    if sample.prompt_index >= 0:
        facts.append(f"row {sample.prompt_index}")
    if sample.duration_s:
        facts.append(f"{sample.duration_s:.2f} s")
    return Text(printable("  ·  ".join(facts)), style="dim")


def _shown(text: str) -> str:
    return printable(text, lines=True)


def _answer(found: list[Piece]) -> Text:
    text = Text()
    versions = {piece.version for piece in found}
    last: int | None = None
    for piece in found:
        if len(versions) > 1 and piece.version != last:
            text.append(f"‹v{piece.version}›" if piece.version != -1 else "‹v?›", style="bold magenta")
            last = piece.version
        text.append(
            f"⟦{_shown(piece.text)}⟧" if piece.is_masked else _shown(piece.text),
            "dim italic" if piece.is_masked else "",
        )
    return text


def _cut(text: Text, is_full: bool) -> Text:
    num_left_out = len(text) - _HEAD - _TAIL
    if is_full or num_left_out <= 0:
        return text
    note = Text(f"\n… {num_left_out:,} characters; --full shows them …\n", style="bold dim")
    return Text.assemble(text[:_HEAD], note, text[-_TAIL:])


def _block(console: Console, name: str, text: Text) -> None:
    console.print(Text(name, style="dim"))
    console.print(Padding(text, (0, 0, 0, 2), expand=False), highlight=False)
