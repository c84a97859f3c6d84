"""A few samples on the page. In: samples, decoded. Out: HTML. Invariant: all text is escaped, and cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fa_rollout.records.history import History
from fa_rollout.records.samples import Choice, KeptSample, SampleOrder, select
from fa_rollout.records.text import Decodes, Piece, pieces, prompt_text
from fa_rollout.report.html import escape

PER_ORDER = 2
MAX_CHARACTERS = 4000
_TITLES = {
    SampleOrder.WORST: "Lowest reward",
    SampleOrder.BEST: "Highest reward",
    SampleOrder.LONGEST: "Longest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One sample, decoded."""

    title: str
    sample: KeptSample
    prompt: str
    answer: list[Piece]


def chosen(folder: Path, history: History, tokenizer: Decodes) -> list[Shown]:
    """The worst, the best, the longest; none twice."""
    found: list[Shown] = []
    seen: set[tuple[int, int, int | None]] = set()
    for order, title in _TITLES.items():
        for sample in select(folder, history, Choice(order=order, limit=PER_ORDER)):
            name = (sample.group, sample.attempt, sample.member)
            if name not in seen:
                seen.add(name)
                prompt = prompt_text(sample, tokenizer)
                found.append(
                    Shown(title=title, sample=sample, prompt=prompt, answer=pieces(sample, tokenizer))
                )
    return found


def sample_cards(samples: Sequence[Shown], without: str) -> str:
    """Cards, or why there are none."""
    if not samples:
        return f'<div class="box"><p class="sum">{escape(without)}</p></div>' if without else ""
    return f'<div class="samples">{"".join(map(_card, samples))}</div>'


def _card(shown: Shown) -> str:
    sample = shown.sample
    facts = [str(sample.fate)]
    if sample.step is not None:
        facts.append(f"step {sample.step}")
    if sample.staleness is not None:
        facts.append(f"staleness {sample.staleness}")
    facts.append(f"{len(sample.response_ids):,} tokens, ended by {sample.finish_reason}")
    facts.append(f"group {sample.group}, sample {sample.member}")
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
    reward = "" if sample.reward is None else f"reward {sample.reward:.4g}" + (f" ({parts})" if parts else "")
    why = f'<p class="why">{escape(sample.reason)}</p>' if sample.reason else ""
    label = (
        "" if sample.label is None else f'<pre class="prompt">label: {escape(str(sample.label)[:400])}</pre>'
    )
    return (
        f'<article class="box sample"><h3>{escape(shown.title)} <span>{escape(reward)}</span>'
        f"<em>{escape(' · '.join(facts))}</em></h3>{why}"
        f'<pre class="prompt" aria-label="prompt" tabindex="0">{escape(_cut(shown.prompt))}</pre>'
        f'<pre aria-label="answer" tabindex="0">{_answer(shown.answer)}</pre>{label}</article>'
    )


def _answer(found: Sequence[Piece]) -> str:
    text, room = [], MAX_CHARACTERS
    has_versions = len({piece.version for piece in found}) > 1
    last: int | None = None
    for piece in found:
        if has_versions and piece.version != last:
            text.append(f'<mark title="from here on by this weight version">v{piece.version}</mark>')
            last = piece.version
        shown = escape(piece.text[:room])
        text.append(f'<s title="not trained">{shown}</s>' if piece.is_masked else shown)
        room -= len(piece.text)
        if room <= 0:
            text.append(" …")
            break
    return "".join(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"
