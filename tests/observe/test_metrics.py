"""The table of metrics: names as OpenMetrics wants them, values of the snapshot, the page with all."""

import re
from pathlib import Path

import pytest

from fa_rollout.observe.metrics import METRICS, PREFIX, Kind, Metric
from fa_rollout.observe.sinks import scalars, step_scalars
from tests.observe.shots import changed, engine, healthy

DOCS = Path(__file__).parents[2] / "docs" / "watching.md"


def values(name: str, snapshot: object = None) -> dict[tuple[str, ...], float]:
    (metric,) = [metric for metric in METRICS if metric.name == name]
    return dict(metric.read(snapshot or healthy()))  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created"))
    assert not re.search(r"_(ms|s|milliseconds|kib|mib|percent)$", metric.name), "base units"
    assert metric.help.endswith(".")
    assert metric.full_name.startswith(f"{PREFIX}_")
    assert metric.full_name.endswith("_total") == (metric.kind is Kind.COUNTER)
    for labels, value in metric.read(healthy()):
        assert len(labels) == len(metric.labels)
        assert isinstance(value, float)


def test_names_are_given_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


def test_values_come_from_the_snapshot() -> None:
    assert values("steps") == {(): 50.0}
    assert values("reward_mean") == {(): pytest.approx(0.59)}
    assert values("trainer_idle_ratio") == {(): pytest.approx(0.02)}
    assert values("groups_ended")["trained",] == 800.0
    assert values("trainer_time_seconds")["training",] == 40.0
    assert values("trainer_phase")["training",] == 1.0
    assert sum(values("trainer_phase").values()) == 1.0
    latencies = {"p50": 1.0, "p99": 3.0}
    snapshot = changed(healthy(), engines=[engine(3, "out", failures={"transient": 4}, latency_s=latencies)])
    url = "http://10.0.0.3:30000"
    assert values("engine_up", snapshot) == {(url,): 0.0}
    assert values("engine_failures", snapshot) == {(url, "transient"): 4.0}
    assert values("engine_latency_seconds", snapshot) == {(url, "0.5"): 1.0, (url, "0.99"): 3.0}


def test_what_is_unknown_is_left_out() -> None:
    fresh = changed(healthy(), steps=[], updates=[], engines=[], generator={"load": None})
    for name in ("reward_mean", "update_load_seconds", "engine_load_ratio", "engine_up"):
        assert values(name, fresh) == {}


def test_names_for_loggers_are_unique_and_flat() -> None:
    flat = list(scalars(healthy()))
    assert len({name for name, _ in flat}) == len(flat)
    assert ("fa_rollout/groups_ended/trained", 800.0) in flat
    assert dict(step_scalars(healthy().steps[-1]))["step/wait_seconds"] == 0.02


def test_the_page_lists_every_metric() -> None:
    listed = set(re.findall(r"^\| `(fa_rollout_\w+)`", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert listed == {metric.full_name for metric in METRICS}
