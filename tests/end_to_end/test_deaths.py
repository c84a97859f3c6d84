"""kill -9 of each process of a running demo: it goes on, or all of it ends with a clear message.

Real engine, generator, hub and two-rank trainer; whatever was seen below the launcher must be gone
at the end, and the run's folder with it. Of the hub and of what starts the ranks: `tests/launcher`.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fa_rollout.demo.plan import prepare
from tests.hub.rig import words
from tests.launcher.processes import Launch

pytestmark = pytest.mark.slow

NUM_STEPS = 20
KILL_AFTER = 4
"""Steps."""


class Demo(Launch):
    """A demo of a few steps, without its view."""

    def __init__(self, folder: Path) -> None:
        self.plan = prepare(folder, model="tiny", seed=0, num_steps=NUM_STEPS, staleness=2, url=None)
        super().__init__(folder, *self.plan.command)

    @property
    def num_steps(self) -> int:
        figures = self.plan.figures
        return len(figures.read_text().splitlines()) if figures.exists() else 0

    def reach(self, num_steps: int) -> "Demo":
        self.until(lambda: self.num_steps >= num_steps, timeout_s=90)
        self.look()
        return self

    def under_way(self) -> "Demo":
        return self.reach(KILL_AFTER)

    def ranks(self) -> list[psutil.Process]:
        self.look()
        return [p for p in self.seen.values() if "-u" in words(p)]

    def events(self) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def assert_complete(self) -> None:
        """All steps trained, all prompts accounted for."""
        end = self.events()[-1]
        counts = end["counts"]
        assert end["event"] == "ended"
        assert self.num_steps == NUM_STEPS
        assert counts["taken"] == sum(number for name, number in counts.items() if name != "taken")
        assert counts["trained"] == NUM_STEPS * 16


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    demo.destroy()


@pytest.mark.timeout(240)
def test_generator_and_engine(demo: Demo) -> None:
    demo.reach(KILL_AFTER).child("fa_rollout.generator").kill()
    demo.reach(2 * KILL_AFTER).child("fa_rollout.engines.embedded").kill()
    assert demo.end(timeout_s=90) == 0, demo.stderr
    demo.assert_complete()
    assert [event["event"] for event in demo.events()].count("generator_ready") == 2
    told = [line for line in demo.stderr.splitlines() if line.startswith("fa-rollout-proc: engine")]
    assert len(told) == 1
    assert told[0].endswith("on the same port")


def test_rank(demo: Demo) -> None:
    demo.under_way().ranks()[1].kill()
    assert demo.end(timeout_s=15) == 137
    assert demo.stderr.count("fa-rollout-proc: the trainer exited with code 137") == 1


def test_launcher(demo: Demo) -> None:
    demo.under_way()
    demo.process.kill()
    demo.process.wait()
    demo.all_gone(timeout_s=15)


def test_interrupt(demo: Demo) -> None:
    demo.under_way().process.send_signal(signal.SIGINT)
    assert demo.end(timeout_s=15) == 130
    assert "Traceback" not in demo.stderr
    counts = demo.events()[-1]["counts"]
    assert counts["taken"] == sum(number for name, number in counts.items() if name != "taken")
