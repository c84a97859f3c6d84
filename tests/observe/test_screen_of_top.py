"""The live view at any size: lines that fit, the verdict first, with and without Unicode and colours."""

import io
import itertools

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import Reason, RunPhase, Snapshot, Wait, WarningText
from fa_rollout.account.verdict import judge, mean_step_s
from fa_rollout.account.words import seconds
from fa_rollout.observe.glyphs import ASCII, UNICODE, glyphs_for
from fa_rollout.observe.screen import draw
from tests.observe.shots import changed, engine, healthy, step

LONG = "a very long text that no terminal has room for " * 6


def busy() -> Snapshot:
    """A run about which there is much to tell."""
    return changed(
        healthy(),
        engines=[engine(n, "ok", latency_s={"p50": 1.0, "p90": 2.0, "p99": 3.0}) for n in range(20)]
        + [engine(77, "out", last_error=LONG, failures={"transient": 7})],
        waits=[Wait(who="all 2 ranks", what=LONG, since_s=12.0)],
        reasons=[Reason(outcome="failed", reason="reward", count=3, last=LONG, age_s=2.0)] * 5,
        warnings=[WarningText(text=f"{number}\n{LONG}", age_s=1.0) for number in range(5)],
    )


@pytest.mark.parametrize(("width", "height"), list(itertools.product((40, 80, 149, 150, 200), (8, 24, 60))))
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_everything_fits_and_the_verdict_comes_first(width: int, height: int, glyphs: object) -> None:
    assert glyphs in (UNICODE, ASCII)
    chosen = UNICODE if glyphs is UNICODE else ASCII
    for snapshot in (healthy(), busy()):
        text = draw(snapshot, snapshot.steps, width=width, height=height, glyphs=chosen, note="12:00:00")
        lines = text.plain.split("\n")
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        assert "fa_rollout 01234567" in lines[0]
        assert "healthy: trainer idle 2%" in lines[1]
        if chosen is ASCII:
            assert text.plain.isascii()


def test_what_is_wrong_and_what_to_do_is_read_to_its_end_where_there_is_room() -> None:
    slow = changed(healthy(), trainer={"recent": TimeSpent(waiting=40.0, training=60.0)})
    verdict = judge(slow)
    for width, height in ((40, 24), (80, 24), (120, 40)):
        lines = draw(slow, [], width=width, height=height, glyphs=UNICODE).plain.split("\n")
        head = " ".join(" ".join(lines[1 : lines.index("")]).split())
        assert head.startswith(f"● {verdict.headline} {verdict.why[:50]}")
        assert head.endswith("..." if width == 40 else verdict.why)
    low = draw(slow, [], width=80, height=10, glyphs=UNICODE).plain.split("\n")
    assert low[3] == "", "a low screen keeps its lines for the figures"


def test_the_time_that_is_left_is_told_while_a_run_goes_on() -> None:
    first = draw(healthy(), [], width=120, height=24, glyphs=UNICODE).plain.split("\n")[0]
    assert f"left {seconds(150 * (mean_step_s(healthy()) or 0))}" in first
    ending = changed(healthy(), run={"phase": RunPhase.ENDING})
    assert "left" not in draw(ending, [], width=120, height=24, glyphs=UNICODE).plain.split("\n")[0]


def test_a_usual_terminal_has_room_for_the_first_line() -> None:
    long = changed(healthy(), run={"num_steps": 3000, "num_trained": 1000, "version": 1000, "uptime_s": 7e4})
    line = draw(long, [], width=80, height=24, glyphs=UNICODE, note="12:00:00").plain.split("\n")[0]
    assert line.rstrip().endswith("12:00:00")


def test_engines_that_stand_still_for_the_trainers_sake_are_told() -> None:
    waits = {"groups": {"limit": "the staleness limit"}, "waits": []}
    still = changed(healthy(), generator={"in_flight": 0}, **waits)
    assert "engines for the trainer" in draw(still, [], width=80, height=40, glyphs=UNICODE).plain
    assert (
        "engines for the trainer"
        not in draw(changed(healthy(), **waits), [], width=80, height=40, glyphs=UNICODE).plain
    )


def test_the_usual_terminal_shows_every_section() -> None:
    plain = draw(busy(), busy().steps, width=80, height=24, glyphs=UNICODE).plain
    labels = ("trainer", "ranks", "steps", "staleness", "groups", "ring", "updates", "engines", "waits")
    for label in (*labels, "slowest", "lost", "warnings"):
        assert f"\n{label} " in plain
    assert "4,100 tokens/s" in plain
    assert "(+" in plain, "what there is no room for is counted"


def test_an_engine_in_trouble_comes_before_those_that_work() -> None:
    lines = draw(busy(), [], width=160, height=50, glyphs=UNICODE).plain.split("\n")
    first = next(line for line in lines[3:] if "10.0.0." in line)
    assert "out 10.0.0.77:30000" in first
    assert "7 failures" in first


def test_a_wide_screen_has_two_columns_and_curves() -> None:
    lines = draw(healthy(), healthy().steps, width=160, height=50, glyphs=UNICODE).plain.split("\n")
    assert any("trainer" in line and "engines" in line for line in lines)
    assert any(line.startswith("reward, 0.100 to 0.590") for line in lines)
    assert sum(line.strip(" ▁▂▃▄▅▆▇█") == "" and "█" in line for line in lines) >= 5


def test_the_end_of_a_run_shows_nothing_under_way() -> None:
    plain = draw(busy(), busy().steps, width=80, height=60, glyphs=UNICODE, is_over=True).plain
    assert "slowest" not in plain
    assert "10.0.0.1:" not in plain
    assert "reward 0.590" in plain


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII)])
def test_characters_follow_the_encoding(encoding: str, expected: object) -> None:
    assert glyphs_for(encoding) is expected


def test_colours_are_no_part_of_the_message() -> None:
    text: Text = draw(busy(), busy().steps, width=80, height=24, glyphs=UNICODE)
    with_colours, without = io.StringIO(), io.StringIO()
    Console(file=with_colours, width=80, force_terminal=True, color_system="truecolor").print(text)
    Console(file=without, width=80, force_terminal=True, no_color=True, color_system=None).print(text)
    assert "\x1b[" in with_colours.getvalue()
    assert "\x1b[" not in without.getvalue()
    assert without.getvalue().rstrip("\n") == text.plain.rstrip("\n")


def test_a_chart_reaches_from_its_lowest_value_to_its_highest() -> None:
    rows = UNICODE.chart([0.0, 0.5, 1.0], 3, 4, low=None, high=None)
    assert [row[2] for row in rows] == ["█"] * 4
    assert [row[0] for row in rows] == [" ", " ", " ", "▁"]
    assert UNICODE.chart([0.7] * 5, 5, 2, low=0.0, high=1.0)[1] == "█████"
    assert UNICODE.curve([step(n).reward_mean for n in range(240)], 24)[-1] == "█"


def test_what_engines_and_user_code_say_cannot_act_on_the_terminal() -> None:
    said = "no\x1b[2J\x1b]0;title\x07\nline of its own \u202etxet\x9b31m"
    now = changed(
        healthy(),
        warnings=[WarningText(text=said, age_s=1.0)],
        reasons=[Reason(outcome="failed", reason="reward", count=3, last=said, age_s=2.0)],
        engines=[engine(1, "out", last_error=said, failures={"transient": 7})],
    )
    lines = draw(now, now.steps, width=240, height=60, glyphs=UNICODE).plain.split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("line of its own") for line in lines)
    assert sum("\\x1b[2J" in line for line in lines) >= 3
