"""The benchmarks behind the page run, say what they should, and one that fails does not hide the others."""

from pathlib import Path

import pytest

from benchmarks import page, validate_simulation
from benchmarks.host import host
from benchmarks.interference.__main__ import OURS, run_row
from benchmarks.interference.load import Load, loads
from benchmarks.interference.work import train
from benchmarks.validate_simulation import Setting, compare, draw, errors


@pytest.mark.slow
def test_a_real_run_and_its_simulation_keep_the_same_bound(tmp_path: Path) -> None:
    setting = Setting(name="wait 1", staleness=1, tokens_per_s=3000.0, train_s=0.02)
    row = compare(setting, num_steps=12)
    for kind in ("measured", "simulated"):
        assert set(row[kind]) == set(validate_simulation.FIGURES)
        assert row[kind]["staleness_p99"] <= 1
        assert row[kind]["step_s"] > 0.02
        assert 0 <= row[kind]["trainer_idle"] < 1
    assert errors([row])["staleness_p99_worst"] <= 1
    draw([row], tmp_path / "curves.svg")
    assert "simulated" in (tmp_path / "curves.svg").read_text()


def test_errors_are_relative_for_times_and_absolute_for_shares() -> None:
    def row(step_s: float, idle: float) -> dict[str, float]:
        zeros = dict.fromkeys(validate_simulation.FIGURES, 1.0)
        return zeros | {"step_s": step_s, "trainer_idle": idle}

    rows = [
        {"measured": row(2.0, 0.5), "simulated": row(2.2, 0.4)},
        {"measured": row(1, 0), "simulated": row(1, 0)},
    ]
    found = errors(rows)
    assert found["step_s_worst"] == pytest.approx(0.1)
    assert found["step_s_mean"] == pytest.approx(0.05)
    assert found["trainer_idle_worst"] == pytest.approx(0.1)


@pytest.mark.slow
def test_this_system_feeds_the_loop_whose_work_is_timed() -> None:
    load = Load(tokens=64, num_slots=8, tokens_per_s=1600.0)
    found = run_row(OURS, load, num_units=2, num_steps=5)
    assert found["samples_per_s"] > 0
    assert found["unit_cpu_ms"] > 0
    assert found["handing_ms"] > 0


def test_only_steps_after_the_warm_up_are_timed() -> None:
    clocked = train(2, 5, lambda: 0.25)
    assert len(clocked.wall_s) == len(clocked.cpu_s) == 2 * 3
    assert clocked.handing_s == [0.25] * 3


def test_loads_are_batches_of_about_a_second() -> None:
    for load in loads(quick=False):
        assert load.groups_per_step * 4 == pytest.approx(load.samples_per_s, rel=0.1)


def test_a_benchmark_that_fails_is_named_and_the_page_has_the_others(tmp_path: Path) -> None:
    broken = page.Part(name="no_such_benchmark", title="Broken", summary=page.client)
    failed = page.run(broken, tmp_path, quick=True)
    assert failed.tree is None
    assert "no_such_benchmark" in failed.failure
    figures = {"slowdown": 0.031, "handing_ms": 0.5, "samples_per_s": 80.0}
    tree = {"rows": [{"load": "much", "row": "this system"} | figures]}
    fine = page.Result(part=page.PARTS[2], command="python -m benchmarks.interference", took_s=1.0, tree=tree)
    text = page.page([failed, fine], host(), quick=True)
    assert "python -m benchmarks.no_such_benchmark --json" in text
    assert "It failed" in text
    assert "| much | this system | +3.1% | 0.50 ms | 80 |" in text
    assert f"cpus {host()['cpus']}" in text


@pytest.mark.parametrize(("load", "is_told"), [(0.1, False), (3.0, True)])
def test_figures_of_a_busy_machine_are_called_noise(load: float, is_told: bool) -> None:
    text = page.page([], host() | {"cpus": 2, "load_average": load}, quick=True)
    assert ("are noise" in text) is is_told


def test_a_client_that_is_not_measured_is_named_and_has_no_column() -> None:
    row = {"kind": "load", "tokens": 512, "in_flight": 32, "results": {"cpu_ms_per_sample": 0.5}}
    rows = [row | {"client": "pool"}]
    alone = list(page.client({"rows": rows, "left_out": {"httpx": "not installed"}}))
    assert alone[0] == "| answers, at once | pool: CPU ms a sample |"
    assert alone[-1] == "\nleft out: httpx: not installed"
    rows.append(row | {"client": "httpx", "results": {"cpu_ms_per_sample": 2.0}})
    both = list(page.client({"rows": rows, "left_out": {}}))
    assert both[0].endswith("| httpx / pool |")
    assert both[-1] == "| 512 tokens, 32 | 0.50 | 2.00 | 4.0 |"
