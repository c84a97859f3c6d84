"""What the run's metrics say of its engines. In: engines as they were seen last. Out: a table in HTML."""

from fa_rollout.account.snapshot import EngineState
from fa_rollout.account.words import number, seconds
from fa_rollout.report.html import escape


def table(engines: list[EngineState]) -> str:
    """A row an engine."""
    if not engines:
        return ""
    rows = "".join(map(_row, engines))
    titles = "<th>engine</th><th>health</th>"
    titles += "".join(f'<th class="n">{head}</th>' for head in ("answers", "tokens", "latency p50", "p99"))
    titles += "<th>failures</th>"
    return (
        f'<div class="box"><div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody>'
        "</table></div></div>"
    )


def _row(engine: EngineState) -> str:
    now = engine.now
    failures = ", ".join(f"{count} {kind}" for kind, count in now.failures.items() if count)
    said = f"{failures or 'none'}" + (f"; the last: {now.last_error[:200]}" if now.last_error else "")
    cells = [
        f"<td>{escape(engine.url)}</td><td>{escape(engine.health)}</td>",
        *(f'<td class="n">{text}</td>' for text in (number(now.num_done), number(now.num_tokens))),
        *(f'<td class="n">{_latency(now.latency_s, name)}</td>' for name in ("p50", "p99")),
        f'<td class="why">{escape(said)}</td>' if failures else "<td>none</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _latency(latency_s: dict[str, float], name: str) -> str:
    return seconds(latency_s[name]) if name in latency_s else "–"
