"""The simulator as a command: knobs, recorded runs, sweeps, pictures; engines that share their speed."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fa_rollout.cli import main, parser
from fa_rollout.config import ConfigError, from_dict, to_dict
from fa_rollout.simulation.model import simulate
from fa_rollout.simulation.outcome import quantile
from fa_rollout.simulation.recorded import scenario_of
from fa_rollout.simulation.scenario import Scenario, lengths_of_file, lognormal_lengths, recorded_lengths
from fa_rollout.simulation.sweep import NAMES, parse

FLAT = recorded_lengths([[1000]])
"""Every answer has 1,000 tokens."""

_LOADED = {"time_s": 0.0, "write_s": 0.0, "load_s": 0.0, "bubble_s": 0.5}


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def figures(path: Path, *words: str) -> list[dict[str, float]]:
    assert main(["simulate", "--steps", "12", "--json", str(path), *words]) == 0
    return [row["figures"] for row in json.loads(path.read_text())]


# --- engines ---------------------------------------------------------------------------------------------


def flat(**changes: object) -> Scenario:
    """One group a step whose four answers take a second each; nothing overlaps."""
    plain = Scenario(
        num_steps=20,
        groups_per_step=1,
        staleness=0,
        lengths=FLAT,
        tokens_per_s=1000.0,
        train_s=1.0,
        update_s=0.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "step_s"),
    [
        ({}, 2.0),
        ({"num_slots": 2}, 3.0),
        ({"num_slots": 2, "num_engines": 2}, 2.0),
        ({"total_tokens_per_s": 1000.0}, 5.0),
        ({"total_tokens_per_s": 1000.0, "num_engines": 2}, 3.0),
        ({"tokens_per_s": 0.0, "total_tokens_per_s": 2000.0}, 3.0),
        ({"prefill_s": 0.5}, 2.5),
        ({"reward_s": 0.25}, 2.25),
        ({"write_s": 0.1, "update_s": 0.2}, 2.3),
        ({"staleness": 1}, 1.0),
        ({"staleness": 1, "update_s": 0.5}, 1.5),
    ],
)
def test_a_step_takes_what_its_parts_take(changes: dict[str, object], step_s: float) -> None:
    assert simulate(flat(**changes)).mean_step_s == pytest.approx(step_s, abs=1e-6)


def test_an_update_makes_what_is_half_made_begin_anew_where_that_is_asked_for() -> None:
    slow = flat(staleness=2, tokens_per_s=400.0)
    resumed, restarted = simulate(slow), simulate(replace(slow, partial="restart"))
    assert resumed.num_restarts == 0 < restarted.num_restarts
    assert restarted.mean_step_s > resumed.mean_step_s
    assert sum(restarted.staleness) < sum(resumed.staleness)


def test_slots_are_counted_from_the_first_to_the_last() -> None:
    assert simulate(flat(num_slots=4)).utilisation == pytest.approx(0.5, abs=1e-6)


def test_a_small_ring_holds_generation_back() -> None:
    wide = Scenario(num_steps=30, staleness=8, num_slots=512)
    narrow = replace(wide, ring_bytes=1 << 19)
    assert simulate(narrow).utilisation < 0.5 * simulate(wide).utilisation
    assert simulate(narrow).mean_step_s > simulate(wide).mean_step_s


@pytest.mark.parametrize(("pause_mode", "partial"), [("abort", "restart"), ("retract", "resume")])
def test_engines_that_hold_answers_in_an_update_restart_nothing(pause_mode: str, partial: str) -> None:
    tree = to_dict(Scenario(partial="restart").config())
    tree["engine"]["pause_mode"] = pause_mode
    assert Scenario().like(from_dict(tree)).partial == partial


# --- lengths ---------------------------------------------------------------------------------------------


def test_recorded_groups_come_in_their_order_and_again() -> None:
    draw = recorded_lengths([[1, 2], [3, 4]])
    assert [draw(random.Random(0), group, 2) for group in range(3)] == [[1, 2], [3, 4], [1, 2]]
    assert set(draw(random.Random(0), 1, 50)) == {3, 4}


def test_lengths_of_a_file_are_cut_and_checked(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("10\n2000\n")
    assert set(lengths_of_file(tmp_path / "lengths", 100)(random.Random(0), 0, 50)) == {10, 100}
    for text in ("", "0\n", "ten\n"):
        (tmp_path / "lengths").write_text(text)
        with pytest.raises(ConfigError, match="lengths must be"):
            lengths_of_file(tmp_path / "lengths", 100)


def test_lognormal_lengths_have_their_median() -> None:
    drawn = sorted(lognormal_lengths(1000, 0.8, 1, 4000)(random.Random(0), 0, 2001))
    assert drawn[1000] == pytest.approx(1000, rel=0.05)
    assert drawn[-1] <= 4000


def test_quantiles_are_values_that_occur() -> None:
    assert [quantile([3, 1, 2, 4], share) for share in (0.0, 0.5, 0.75, 0.99)] == [1, 2, 3, 4]


# --- a run that was --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of one group each: answers of 100 and 200 tokens, 2 s each; training 3 s, loading 0.5 s."""
    config = {
        **{"data": {"path": "p"}, "reward": {"function": "a:b"}, "engine": {"urls": ["http://e"]}},
        "rollout": {"num_steps": 9, "groups_per_step": 1, "samples_per_group": 2, "staleness": 1},
    }
    events = [
        {
            "t": 0.0,
            "event": "began",
            "run": "r",
            "lineage": "a",
            "time_s": 0.0,
            "folder": "",
            "config": config,
        },
        {"t": 0.0, "event": "generator_started", "incarnation": 1},
        {
            "t": 0.1,
            "event": "generator_ready",
            "incarnation": 1,
            "engines": ["http://e", "http://f"],
            "concurrency": 8,
        },
    ]
    for step, at in enumerate((10.0, 20.0)):
        of_group = {"group": step, "attempt": 0}
        events += [
            {"t": at - 3, "event": "issued", "groups": [step], "attempts": [0], "kept": []},
            {"t": at - 2, "event": "dispatched", "groups": [step], "version": step},
            {"t": at, "event": "committed", **of_group, "sequence": step, "versions": [step, step],
             "bytes": 9, "prompt_lens": [7, 7], "response_lens": [100, 200], "rewards": [0.0, 1.0]},
            {"t": at, "event": "composed", "step": step, "version": step, "groups": [step], "ranks": []},
            {"t": at, "event": "handed", "step": step, "rank": 0, "peer": 0, "waited_s": 1.0},
            {"t": at + 3, "event": "finished", "step": step, "rank": 0, "peer": 0, "outcome": "trained"},
            {"t": at + 3, "event": "trained", "step": step, "version": step, "groups": [step]},
            {"t": at + 3, "event": "update", "phase": "entering"},
            {"t": at + 3.1, "event": "update", "phase": "open", "version": step + 1},
            {"t": at + 3.4, "event": "update", "phase": "publishing", "version": step + 1},
            {"t": at + 4, "event": "published", "version": step + 1, "figures": _LOADED | {"version": 1}},
        ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


def test_a_recorded_run_is_a_scenario(folder: Path) -> None:
    found = scenario_of(folder)
    assert (found.num_steps, found.staleness, found.num_engines, found.prompt_tokens) == (2, 1, 2, 7)
    assert found.lengths(random.Random(0), 0, 2) == [100, 200]
    assert found.tokens_per_s == pytest.approx(100.0)
    times = (found.train_s, found.write_s, found.update_s)
    assert times == pytest.approx((3.0, 0.3, 0.5))


def test_flags_change_a_recorded_runs_knobs(folder: Path, tmp_path: Path) -> None:
    like = ("--like", str(folder))
    (before,) = figures(tmp_path / "a.json", *like)
    (after,) = figures(tmp_path / "b.json", *like, "--rollout.staleness", "0")
    assert before["staleness_p99"] == 1
    assert after["staleness_p99"] == 0
    assert after["trainer_idle"] > before["trainer_idle"]


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must hold events.jsonl" in refused(["--like", str(tmp_path)], capsys)
    (tmp_path / "events.jsonl").write_text("{}\n")
    assert "a run with steps" in refused(["--like", str(tmp_path)], capsys)


# --- the command -----------------------------------------------------------------------------------------


def test_a_sweep_is_every_combination_with_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    sweep = ("--sweep", "staleness=0..2", "policy=wait,keep", "--picture", str(picture))
    rows = figures(tmp_path / "rows.json", *sweep)
    assert len(rows) == 6
    assert [row["staleness_p99"] for row in rows[::2]] == [0, 1, 2]
    assert "trainer idle" in picture.read_text()


def test_the_configuration_gives_the_knobs(tmp_path: Path) -> None:
    words = "--rollout.num_steps 9 --rollout.groups_per_step 2 --rollout.samples_per_group 2 --engine.model m"
    given = [*words.split(), "--data.path", "p", "--reward.function", "a:b", "--rollout.staleness", "1"]
    (row,) = figures(tmp_path / "a.json", *given, "--train-s", "2m", "--update-s", "250ms")
    assert row["step_s"] == pytest.approx(120.25, abs=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "stalenes=1"], "staleness"),
        (["--sweep", "staleness=x"], "values such as 4"),
        (["--sweep", "staleness=0..99", "engines=1,2,3,4,5,6,7,8,9,10,11"], "1000 settings"),
        (["--sweep", "policy=maybe"], "staleness_policy"),
        (["--picture", "x.svg"], "add --sweep"),
        (["--lengths", "lognormal:1"], "lognormal:MEDIAN:SIGMA"),
        (["--lengths", "nowhere"], "whole numbers"),
        (["--train-s", "soon"], "30s"),
        (["--rollout.staleness", "-1"], "rollout.staleness"),
        (["--sweep", "staleness=0", "--picture", "x.unknown"], "must be named"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(words, capsys)


def test_help_names_every_knob_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["simulate", "--help"])
    shown = capsys.readouterr().out.rpartition("--sweep accepts")[2]
    assert set(re.findall(r"\w+", shown)) - {"and"} == set(NAMES)


def test_values_are_of_the_knobs_kind() -> None:
    sweep = parse(["train-s=1,2.5", "concurrency=8..10"])
    assert sweep[0].values == (1.0, 2.5)
    assert (sweep[1].field, sweep[1].values) == ("num_slots", (8, 9, 10))
