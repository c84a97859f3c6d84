"""The report's numbers are those of the events, its trace file is one that trace viewers read."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fa_rollout.account import event_file, events
from fa_rollout.account.bound import Bound
from fa_rollout.account.figures import TimeSpent
from fa_rollout.cli import main
from fa_rollout.records.folder import launches
from fa_rollout.records.history import History, histories
from fa_rollout.report import figures, trace
from fa_rollout.report.page import page
from fa_rollout.report.summary import summarize
from fa_rollout.report.ticks import clock, ticks, time_ticks
from fa_rollout.report.timeline import lanes, spans
from tests.records.conftest import GROUPS_PER_STEP, NUM_STEPS, SAMPLES_PER_GROUP, Recorded
from trainer_hook.messages import Outcome

pytestmark = pytest.mark.slow


@pytest.fixture
def history(recorded: Recorded) -> History:
    return launches(recorded.folder)[-1]


def test_every_step_has_its_rewards_sizes_and_staleness(recorded: Recorded, history: History) -> None:
    steps = figures.steps_of(history)
    assert [step.step for step in steps] == list(range(NUM_STEPS))
    for step in steps:
        own = [(group, member) for number, _, group, member in recorded.trained if number == step.step]
        assert step.num_samples == len(own) == GROUPS_PER_STEP * SAMPLES_PER_GROUP
        assert step.reward_mean == pytest.approx(fmean(recorded.rewards[name] for name in own))
        assert step.response_tokens == sum(len(recorded.responses[name]) for name in own)
        assert step.staleness_max is not None
        assert 0 <= step.staleness_max <= 2
        assert step.spent.total_s > 0


def test_the_trainers_time_is_the_hubs_own_and_adds_up(recorded: Recorded, history: History) -> None:
    steps = figures.steps_of(history)
    whole = figures.spent(history, steps)
    assert whole == history.spent
    assert sum(step.spent.total_s for step in steps) <= whole.total_s + 1e-3
    told = [event["figures"] for event in recorded.events if event["event"] == "trained"]
    assert [step.time_s for step in steps] == [one["time_s"] for one in told]


def test_counts_are_the_hubs_own_and_those_of_a_run_that_goes_on_add_up(recorded: Recorded) -> None:
    log = list(event_file.read(recorded.folder / event_file.FILE_NAME))
    for length in range(1, len(log) + 1, 7):
        (part,) = histories(log[:length])
        books = part.books
        assert books["taken"] == sum(count for name, count in books.items() if name != "taken")
        page(summarize(part))  # a report can be made at any time
    (whole,) = histories(log)
    ended = whole.counts
    whole.counts = {}
    assert {name: whole.books[name] for name in ended} == ended


def test_a_rank_enters_an_update_when_its_step_is_done_and_evaluations_have_lanes() -> None:
    log: list[events.Event] = [
        events.HubBegan(t=0.0, run="r", lineage="", time_s=0.0, folder="", config={}),
        events.StepComposed(t=1.0, step=0, version=0, groups=[], ranks=[]),
        *(events.PartHanded(t=1.0, step=0, rank=rank, peer=0, waited_s=0.0) for rank in range(2)),
        events.PartFinished(t=2.0, step=0, rank=0, peer=0, outcome=Outcome.TRAINED),
        events.UpdateMoved(t=2.1, phase="entering"),
        events.PartFinished(t=3.0, step=0, rank=1, peer=0, outcome=Outcome.TRAINED),
        events.VersionPublished(t=4.0, version=1, figures=None),
        *(events.EvaluationBegan(t=5.0 + number, number=number, rank=0, dataset=None) for number in range(3)),
        events.EvaluationFinished(t=6.5, number=0, prompts=0, error=None),
    ]
    (history,) = histories(log)
    by_lane = lanes(spans(history))
    updates = {
        lane: [s.start_s for s in by_lane[lane] if s.kind == "update"] for lane in ("rank 0", "rank 1")
    }
    assert updates == {"rank 0": [2.1], "rank 1": [3.0]}
    assert [s.name for s in by_lane["evaluation"]] == ["evaluation 0", "evaluation 2"]
    assert [s.name for s in by_lane["evaluation 2"]] == ["evaluation 1"]


def test_failures_are_counted_by_class(recorded: Recorded, history: History) -> None:
    counts = recorded.events[-1]["counts"]
    found = {(how, kind): count for how, kind, count, _ in figures.reasons(history)}
    assert found["failed", "generate: ValueError"] == counts["failed"]
    assert sum(found.values()) == counts["failed"] + counts["filtered"] + counts["dropped"]


def test_a_generator_that_was_away_while_the_trainer_waited_is_named() -> None:
    spent = TimeSpent(waiting=6.0, training=3.0, without_generator=4.0)
    log: list[events.Event] = [
        events.HubBegan(t=0.0, run="r", lineage="", time_s=0.0, folder="", config={}),
        events.GeneratorStarted(t=0.0, incarnation=1),
        events.GeneratorDied(t=4.0, how="by signal SIGKILL", requeued=[]),
        events.HubEnded(t=9.0, exit_code=0, text="", counts={}, spent=spent),
    ]
    (history,) = histories(log)
    verdict = summarize(history).verdict
    assert verdict.bound is Bound.GENERATOR
    assert "The generator was replaced once" in " ".join(verdict.notes)


def test_levels_and_tokens_integrate_to_what_the_groups_had(history: History) -> None:
    over = figures.series(history, 50)
    committed = [group for group in history.groups.values() if group.committed_s is not None]
    tokens = sum(sum(group.response_lens) for group in committed)
    assert sum(over.tokens_per_s) * over.width_s == pytest.approx(tokens)
    held = sum(((g.ended_s or history.last_s) - (g.committed_s or 0.0)) * g.num_bytes for g in committed)
    assert sum(over.ring_bytes) * over.width_s == pytest.approx(held, rel=1e-6)


def test_lanes_show_the_kill_the_bubbles_and_the_evaluation(history: History) -> None:
    by_lane = lanes(spans(history))
    assert [span.name for span in by_lane["generator"]] == [
        "life 1 starts",
        "life 1",
        "life 2 starts",
        "life 2",
    ]
    assert by_lane["generator"][1].facts == {"ended": "by signal SIGKILL"}
    assert sum(span.kind == "bubble" for span in by_lane["engines"]) >= NUM_STEPS - 1
    assert [span.kind for span in by_lane["evaluation"]] == ["evaluation"]
    for members in by_lane.values():
        for before, after in pairwise(members):
            assert before.duration_s >= -1e-6
            assert after.start_s >= before.end_s - 1e-6


def test_the_trace_is_of_the_form_that_viewers_read(history: History, tmp_path: Path) -> None:
    trace.write(history, tmp_path / "trace.json")
    tree = json.loads((tmp_path / "trace.json").read_text())
    assert tree["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = tree["traceEvents"]
    open_slices: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)
            case "X":
                assert event["dur"] >= 0
                threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
            case "b":
                open_slices[event["pid"], event["cat"], event["id2"]["local"], event["name"]].append(
                    event["ts"]
                )
            case "e":
                assert (
                    event["ts"]
                    >= open_slices[event["pid"], event["cat"], event["id2"]["local"], event["name"]].pop()
                )
            case "C":
                assert isinstance(event["args"]["value"], int | float)
            case "i":
                assert event["s"] in ("g", "p", "t")
            case other:
                raise AssertionError(f"an unknown phase {other}")
    assert not any(open_slices.values())
    for slices in threads.values():
        for (start, duration), (following, _) in pairwise(sorted(slices)):
            assert following >= start + duration, "slices of a thread do not overlap"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named
    assert not any(tid in (0, pid) for pid, tid in threads), "neither an idle thread nor a main one"
    trained = [e for e in events if e["ph"] == "X" and e["cat"] == "train"]
    assert [e["name"] for e in trained] == [f"step {step}" for step in range(NUM_STEPS)]


def test_the_command_writes_a_page_that_holds_everything(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.html"
    words = ["report", str(recorded.folder), "--output", str(output), "--trace", str(tmp_path / "trace.json")]
    assert main(words) == 0
    said = capsys.readouterr().out
    text = output.read_text(encoding="utf-8")
    assert str(output) in said
    for word in ("Timeline", "Reward", "How stale", "nothing was lost", "generate: ValueError", "tool 42"):
        assert word in text
    assert "src=" not in text
    assert "href=" not in text


def test_what_comes_from_a_run_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    log: list[events.Event] = [
        events.HubBegan(
            t=0.0,
            run=evil,
            config={"rollout": {"staleness": 1, "filter": evil}},
            lineage="",
            time_s=0.0,
            folder="",
        ),
        events.GroupsIssued(t=1.0, groups=[0], attempts=[0], kept=[]),
        events.GroupFailed(t=2.0, group=0, reason=evil, attempt=0),
        events.WarningLogged(t=3.0, text=evil),
        events.RunFailed(t=4.0, error="Error", text=evil),
    ]
    (history,) = histories(log)
    text = page(summarize(history), without_samples=evil)
    assert evil not in text
    assert text.count("<script>") == 1


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert time_ticks(55.0) == [0, 15, 30, 45]
    assert [clock(v, 600) for v in (0, 90)] == ["0:00", "1:30"]
