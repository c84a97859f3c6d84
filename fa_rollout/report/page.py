"""The page: everything of a summary in one HTML file that needs nothing else.

In: a summary, samples. Out: HTML. Invariant: no address outside of the page is named in it, and whatever came
from a run is escaped.
"""

import datetime
from collections.abc import Sequence
from importlib.resources import files

from fa_rollout.account.bound import Level
from fa_rollout.account.snapshot import EngineState
from fa_rollout.account.words import number, seconds
from fa_rollout.config import to_toml
from fa_rollout.process.masking import masked
from fa_rollout.records.history import History
from fa_rollout.records.story import ENDS
from fa_rollout.report import engines as engine_table
from fa_rollout.report import figures, pictures
from fa_rollout.report.html import escape, policy
from fa_rollout.report.sample_cards import Shown, sample_cards
from fa_rollout.report.summary import Summary
from fa_rollout.version import __version__

MAX_WARNINGS = 40
MAX_REASONS = 20


def page(
    summary: Summary,
    samples: Sequence[Shown] = (),
    *,
    engines: Sequence[EngineState] = (),
    without_samples: str = "",
) -> str:
    """The whole page.

    Args:
        engines: as the metrics saw them last.
        without_samples: why there are none.
    """
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = f"Run {summary.history.run[:8]}"
    body = "".join(
        (
            _header(summary, title),
            _verdict(summary),
            _tiles(summary),
            _section(
                "Where the trainer's time went",
                f'<div class="box">{pictures.where_time_went(summary)}</div>',
            )
            if summary.spent.total_s > 0
            else "",
            _section("Timeline", f'<div class="wide">{pictures.timeline(summary)}</div>'),
            _section("Learning", _charts(pictures.reward(summary), pictures.lengths(summary))),
            _section("Staleness", _charts(pictures.staleness(summary))),
            _section("In flight", _charts(pictures.flow(summary))),
            _section("Engines", engine_table.table(list(engines))),
            _section("What became of every prompt", _books(summary)),
            _section("Samples", sample_cards(samples, without_samples)),
            _section("Warnings", _warnings(summary.history)) if summary.history.warnings else "",
            _section("Configuration", _configuration(summary.history)),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{policy(script)}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}"
        f"<footer>Made by fa-rollout-proc report, fa_rollout {escape(__version__)}. Times are those of "
        f"the hub's event log.</footer></main><script>{script}</script></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _charts(*found: str) -> str:
    content = "".join(found)
    return f'<div class="charts">{content}</div>' if content else ""


def _header(summary: Summary, title: str) -> str:
    history = summary.history
    if history.exit_code is None:
        badge = '<span class="badge live">no end recorded: still running, or its hub was killed</span>'
    elif summary.verdict.level is Level.BAD:
        badge = f'<span class="badge bad">exit code {history.exit_code}</span>'
    else:
        badge = f'<span class="badge good">{escape(history.ending)}</span>'
    began = ""
    if history.time_s is not None:
        when = datetime.datetime.fromtimestamp(history.time_s).astimezone()
        began = f"<span>began {when:%Y-%m-%d %H:%M %Z}</span>"
    return (
        f"<header><h1>{escape(title)}</h1>{began}<span>{seconds(summary.duration_s)}</span>{badge}</header>"
    )


def _verdict(summary: Summary) -> str:
    verdict = summary.verdict
    said = verdict.headline[:1].upper() + verdict.headline[1:]
    notes = "".join(f"<li>{escape(text)}</li>" for text in verdict.notes)
    return (
        f'<section class="verdict {verdict.level}" aria-label="Verdict"><p>{escape(said)}.</p>'
        f'<p>{escape(verdict.why)}</p><ul class="notes">{notes}</ul></section>'
    )


def _tiles(summary: Summary) -> str:
    history, rewards = summary.history, [step.reward_mean for step in summary.steps]
    tenth = max(1, len(rewards) // 10)
    first, last = rewards[:tenth], rewards[-tenth:]
    wanted = (history.config.get("rollout") or {}).get("num_steps")
    trained = sum(step.trained_s is not None for step in history.steps.values())
    idle = summary.spent.idle
    oldest = max((s.staleness_max for s in summary.steps if s.staleness_max is not None), default=None)
    working_s = summary.spent.total_s
    tiles = [
        ("Steps trained", number(trained), f"of {wanted}" if wanted else ""),
        (
            "Reward",
            f"{sum(last) / len(last):.3g}" if last else "–",
            f"from {sum(first) / len(first):.3g}, first and last tenth" if first else "",
        ),
        (
            "Trainer idle",
            "–" if idle is None else f"{idle:.1%}",
            "waiting for data",
        ),
        ("Stalest sample", "–" if oldest is None else str(oldest), f"limit {summary.staleness}"),
        (
            "Tokens per second",
            number(summary.num_tokens / working_s) if working_s else "–",
            "trained, of responses",
        ),
        ("Samples trained", number(sum(s.num_samples for s in summary.steps)), ""),
    ]
    cells = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _books(summary: Summary) -> str:
    books = summary.history.books
    taken, settled = books.get("taken", 0), {name: books.get(name, 0) for name in ENDS}
    missing = taken - sum(settled.values()) - books.get("returned", 0)
    verdict = "nothing was lost" if missing == 0 else f"<b>{missing} are missing</b>"
    told = " + ".join(f"{count:,} {name}" for name, count in settled.items())
    lines = "".join(
        f'<tr><td>{escape(how)}</td><td class="n">{count:,}</td><td>{escape(kind)}</td>'
        f'<td class="why">{escape(example[:300])}</td></tr>'
        for how, kind, count, example in figures.reasons(summary.history)[:MAX_REASONS]
    )
    table = (
        '<div class="scroll"><table><thead><tr><th>ended</th><th class="n">groups</th><th>class</th>'
        f"<th>the latest</th></tr></thead><tbody>{lines}</tbody></table></div>"
        if lines
        else ""
    )
    return (
        f'<div class="box">{table}<p class="sum">{taken:,} prompts taken = {told} + '
        f"{books.get('returned', 0):,} returned to the data or in progress: {verdict}.</p></div>"
    )


def _warnings(history: History) -> str:
    lines = "".join(
        f'<tr><td class="n">{seconds(time_s - history.began_s)}</td><td class="why">{escape(text)}</td></tr>'
        for time_s, text in history.warnings[:MAX_WARNINGS]
    )
    rest = len(history.warnings) - MAX_WARNINGS
    more = f'<p class="sum">and {rest:,} more in events.jsonl</p>' if rest > 0 else ""
    return (
        '<div class="box"><div class="scroll"><table><thead><tr><th class="n">after</th>'
        f"<th>warning</th></tr></thead><tbody>{lines}</tbody></table></div>{more}</div>"
    )


def _configuration(history: History) -> str:
    if not history.config:
        return ""
    tables = {name: keys for name, keys in history.config.items() if isinstance(keys, dict)}
    text = to_toml(masked(tables))
    return f'<details class="box"><summary>as the hub had it</summary><pre>{escape(text)}</pre></details>'
