"""The lines of the live view, section by section: figures in, words with styles out.

Styles are for those who see colours; every line says the same without.
"""

import textwrap
from collections.abc import Sequence
from urllib.parse import urlsplit

from fa_rollout.account.bound import Level
from fa_rollout.account.figures import StepFigures
from fa_rollout.account.snapshot import STALENESS_LIMIT, RankFigures, RunPhase, Snapshot, TrainerPhase
from fa_rollout.account.verdict import Verdict, mean_step_s
from fa_rollout.account.words import maybe, number, seconds, share, size
from fa_rollout.observe.glyphs import Glyphs

Line = list[tuple[str, str]]
"""(words, style)."""

STYLES = {Level.OK: "bold green", Level.NOTE: "bold cyan", Level.WARN: "bold yellow", Level.BAD: "bold red"}
SIGNS = {Level.OK: "OK", Level.NOTE: "..", Level.WARN: "! ", Level.BAD: "!!"}
_ROOMY = 20
"""Lines of a screen from which on the verdict may take `_MOST_LINES` for what is wrong and for what to do."""
_MOST_LINES = 3
_CURVE = 24
_BAR = 12
_PHASE_WORDS = {
    TrainerPhase.ABSENT: "not connected",
    TrainerPhase.ATTACHING: "connecting",
    TrainerPhase.WAITING: "waiting for data",
    TrainerPhase.WAITING_FOR_RANKS: "waiting for ranks",
    TrainerPhase.TRAINING: "training",
    TrainerPhase.UPDATING: "updating",
    TrainerPhase.OUTSIDE: "own code",
}
_HEALTH_STYLES = {
    "ok": "green",
    "paused": "cyan",
    "narrowed": "yellow",
    "failing": "bold red",
    "out": "bold red",
}


def head(now: Snapshot, verdict: Verdict, glyphs: Glyphs, width: int, height: int, note: str) -> list[Line]:
    """What run it is, how it is, and why; the last two on more than one line where there is room."""
    run = now.run
    title = f"fa_rollout {run.name[:8]}"
    place = f"step {run.num_trained}/{run.num_steps}  v{run.version}  up {seconds(run.uptime_s)}"
    if (left_s := _left_s(now)) > 0:
        place += f"  left {seconds(left_s)}"
    bar_width = max(0, min(30, width - len(title) - len(place) - len(note) - 8))
    bar = glyphs.bar(run.num_trained / max(1, run.num_steps), bar_width)
    first: Line = [(f"{title}  ", "bold"), (f"{place}  ", ""), (f"{bar}  ", "blue"), (note, "dim")]
    sign = SIGNS[verdict.level] if glyphs.is_ascii else glyphs.dot
    most = 1 if height < _ROOMY else _MOST_LINES
    style = "dim" if verdict.level is Level.OK else ""
    return [
        first,
        *([(line, STYLES[verdict.level])] for line in _wrapped(f"{sign} ", verdict.headline, width, most)),
        *([(line, style)] for line in _wrapped("  ", verdict.why, width, most)),
    ]


def _left_s(now: Snapshot) -> float:
    """Of the run, if its further steps take as long as those so far; 0: nothing is known."""
    if now.run.phase is not RunPhase.RUNNING:
        return 0.0
    return (now.run.num_steps - now.run.num_trained) * (mean_step_s(now) or 0.0)


def _wrapped(start: str, text: str, width: int, most: int) -> list[str]:
    lines = textwrap.wrap(text, max(8, width - 2), max_lines=most, placeholder=" ...", break_on_hyphens=False)
    return [(start if number == 0 else "  ") + line for number, line in enumerate(lines or [""])]


def trainer(now: Snapshot, glyphs: Glyphs) -> list[Line]:
    """What it does, and where its time went lately."""
    phase, recent = now.trainer.phase, now.trainer.recent
    words = _PHASE_WORDS | {TrainerPhase.UPDATING: _update_words(now)}
    line: Line = [(f"{words[phase]} {seconds(now.trainer.since_s)}", _phase_style(phase))]
    if recent.total_s:
        always = {"idle": recent.waiting, "train": recent.training, "update": recent.updating}
        rest = {"wait for ranks": recent.waiting_for_ranks, "own code": recent.outside}
        parts = always | {name: value for name, value in rest.items() if value > 0.005 * recent.total_s}
        told = [f"{name} {share(value / recent.total_s)}" for name, value in parts.items()]
        line.append((f"; last {seconds(recent.total_s)}: {', '.join(told)}", ""))
    return [line]


def ranks(now: Snapshot) -> list[Line]:
    """Each rank, those in one phase together."""
    together: dict[tuple[TrainerPhase, int | None], list[RankFigures]] = {}
    for rank in sorted(now.trainer.ranks, key=lambda rank: (rank.dp_rank, rank.peer)):
        together.setdefault((rank.phase, rank.step), []).append(rank)
    lines: list[Line] = []
    for (phase, step), members in together.items():
        who = ", ".join(f"{m.dp_rank}" + (f".{m.peer}" if m.peer else "") for m in members[:8])
        who += f" ... ({len(members)})" if len(members) > 8 else ""
        what = f"{_PHASE_WORDS[phase]}{'' if step is None else f' step {step}'}"
        longest = max(member.since_s for member in members)
        held = sum(member.num_leases for member in members)
        pids = " ".join(str(member.pid) for member in members[:4])
        lines.append(
            [
                (f"{who}: ", ""),
                (f"{what} {seconds(longest)}", _phase_style(phase)),
                (f"   {held} records held   pid {pids}", "dim"),
            ]
        )
    return lines


def steps(now: Snapshot, done: Sequence[StepFigures], glyphs: Glyphs) -> list[Line]:
    """Reward and speed of the trained steps."""
    if not done:
        return [[("none trained yet", "dim")]]
    last = done[-1]
    spent_s = sum(step.spent.total_s for step in done[-20:]) or 1e-9
    tokens_per_s = sum(step.response_tokens for step in done[-20:]) / spent_s
    mean_s = spent_s / len(done[-20:])
    length = sum(s.response_tokens for s in done[-20:]) / max(1, sum(s.num_samples for s in done[-20:]))
    curve = glyphs.curve([step.reward_mean for step in done], _CURVE)
    return [
        [(f"reward {last.reward_mean:.3f} ", "bold"), (curve, "green")],
        [
            (f"{seconds(mean_s)} a step, {number(tokens_per_s)} trained tokens/s, ", ""),
            (f"{number(length)} tokens an answer", ""),
        ],
    ]


def staleness(now: Snapshot, done: Sequence[StepFigures], glyphs: Glyphs) -> list[Line]:
    """How old what was trained was, and what is under way is."""
    bound, ages = now.run.staleness, now.staleness
    line: Line = []
    curve = ""
    if done:
        last = done[-1]
        known = [float(step.staleness_max) for step in done if step.staleness_max is not None]
        mean = "-" if last.staleness_mean is None else f"{last.staleness_mean:.1f}"
        curve = glyphs.curve(known, _CURVE // 2) if len(set(known)) > 1 else ""
        line.append((f"last {maybe(last.staleness_max)}, mean {mean}, ", ""))
    line.append((f"most {maybe(ages.trained_max)}, limit {bound} " if done else f"limit {bound}", ""))
    line.append((f"{curve}  ", "magenta"))
    line.append((f"running {maybe(ages.running_max)}, ready {maybe(ages.ready_max)}", "dim"))
    return [line]


def groups(now: Snapshot) -> list[Line]:
    """Where the prompt groups are."""
    g = now.groups
    at = f"{g.issued} queued > {g.running} running > {g.committed} ready > {g.handed} in training"
    back = f", {g.queued} given back" if g.queued else ""
    ends = f"{number(g.trained)} trained, {g.filtered} filtered, {g.failed} failed, {g.dropped} dropped"
    lines: list[Line] = [[(at + back, "")], [(ends, "dim")]]
    if g.limit and not g.credits:
        lines.append([(f"no new groups: {g.limit}", "dim")])
    return lines


def ring(now: Snapshot, glyphs: Glyphs) -> list[Line]:
    """How full the shared memory is, and who holds it."""
    used = now.ring.span_bytes / max(1, now.ring.bytes)
    style = "red" if used > 0.95 else "yellow" if used > 0.85 else ""
    line: Line = [
        (glyphs.bar(used, _BAR), style or "blue"),
        (f" {share(used)} of {size(now.ring.bytes)}, {now.ring.num_records} records", style),
    ]
    if now.ring.oldest_lease_of is not None:
        whose = now.ring.oldest_lease_of.partition(" (")[0]
        line.append((f"   oldest lease {seconds(now.ring.oldest_lease_s)} ({whose})", "dim"))
    return [line]


def updates(now: Snapshot) -> list[Line]:
    """What weight updates cost."""
    if not now.totals.updates:
        return [[("none published yet", "dim")]]
    mean_s = now.totals.bubble_s / now.totals.updates
    line: Line = [(f"{now.totals.updates} published, engines paused {seconds(mean_s)} each", "")]
    if now.updates:
        last = now.updates[-1]
        line.append((f"; last: write {seconds(last.write_s)}, load {seconds(last.load_s)}", "dim"))
    return [line]


def engines(now: Snapshot, glyphs: Glyphs) -> list[Line]:
    """All of them in one line, then each; those in trouble first."""
    generator = now.generator
    slots = generator.capacity
    total: Line = [
        (f"{number(generator.tokens_per_s)} tokens/s", "bold"),
        (f", {share(generator.busy)} busy", ""),
        (f", {generator.in_flight} of {slots} slots in use, {share(generator.load)} on average", ""),
    ]
    if generator.waiting_for_engines:
        total.append((f", {generator.waiting_for_engines} requests wait", ""))
    if generator.rewards_in_progress:
        total.append((f", {generator.rewards_in_progress} samples being scored", ""))
    order = ("out", "failing", "narrowed", "paused", "ok")
    lines = [total]
    for engine in sorted(now.engines, key=lambda e: (order.index(e.health), e.url)):
        figures = engine.now
        name = urlsplit(engine.url).netloc or engine.url
        failed = sum(figures.failures.values())
        line: Line = [
            (f"{engine.health} ", _HEALTH_STYLES[engine.health]),
            (f"{name} {glyphs.bar(figures.in_flight / max(1, figures.capacity), 5)} ", ""),
            (f"{figures.in_flight}/{figures.allowed} {number(engine.tokens_per_s)}/s", ""),
        ]
        if failed:
            line.append((f" {failed} failures: {figures.last_error}", "yellow"))
        if figures.latency_s:
            p50, p99 = figures.latency_s.get("p50", 0.0), figures.latency_s.get("p99", 0.0)
            line.append((f" p50 {seconds(p50)} p99 {seconds(p99)}", ""))
        if figures.version is not None:
            line.append((f" v{figures.version.rpartition(':')[2]}", "dim"))
        lines.append(line)
    return lines


def charts(steps: Sequence[StepFigures], glyphs: Glyphs, width: int, height: int) -> list[Line]:
    """Reward, and below it the trainer's idle share, over all steps that are known."""
    if len(steps) < 2 or height < 6:
        return []
    rewards = [step.reward_mean for step in steps]
    idle = [step.spent.idle or 0.0 for step in steps]
    half = (height - 2) // 2
    lines: list[Line] = [[(f"reward, {min(rewards):.3f} to {max(rewards):.3f}", "dim")]]
    lines += [[(row, "green")] for row in glyphs.chart(rewards, width, half, low=None, high=None)]
    lines.append([(f"trainer idle by step, {share(min(idle))} to {share(max(idle))}", "dim")])
    lines += [[(row, "yellow")] for row in glyphs.chart(idle, width, min(half, 4), low=0.0, high=1.0)]
    return lines


def waits(now: Snapshot) -> list[Line]:
    """Who waits for whom."""
    lines: list[Line] = [
        [(f"{seconds(w.since_s)} ", "yellow" if w.since_s > 10 else ""), (f"{w.who} for {w.what}", "")]
        for w in now.waits
    ]
    if lines:
        return lines
    is_limited = not now.generator.in_flight and now.groups.limit == STALENESS_LIMIT
    return [[(f"engines for the trainer: {STALENESS_LIMIT} is reached" if is_limited else "none", "dim")]]


def slowest(now: Snapshot) -> list[Line]:
    """What takes longest."""
    lines: list[Line] = [
        [(f"{seconds(one.age_s)} ", ""), (f"{one.name}  {one.where}", "dim")] for one in now.slowest
    ]
    return lines or [[("nothing in progress", "dim")]]


def lost(now: Snapshot) -> list[Line]:
    """Why groups were not trained."""
    return [
        [
            (f"{r.count} {r.outcome}: ", "red" if r.outcome == "failed" else ""),
            (f"{r.last}  ", ""),
            (f"{seconds(r.age_s)} ago", "dim"),
        ]
        for r in now.reasons
    ]


def warnings(now: Snapshot) -> list[Line]:
    """The latest first."""
    return [
        [
            (f"{seconds(w.age_s)} ago{f' ({w.count} times)' if w.count > 1 else ''}: ", "yellow"),
            (" ".join(w.text.split()), ""),
        ]
        for w in reversed(now.warnings)
    ]


def _update_words(now: Snapshot) -> str:
    words = {"entering": "entering an update", "open": "writing weights", "publishing": "loading weights"}
    return words.get(now.trainer.in_update, "updating")


def _phase_style(phase: TrainerPhase) -> str:
    styles = {TrainerPhase.WAITING: "yellow", TrainerPhase.TRAINING: "green", TrainerPhase.UPDATING: "cyan"}
    return styles.get(phase, "")
