"""What the demo shows and says: figures as they come, curves, the books."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fa_rollout.config import load
from fa_rollout.demo import sglang
from fa_rollout.demo.curve import draw, smooth, sparkline
from fa_rollout.demo.figures import DemoStep, FiguresLog, FiguresReader
from fa_rollout.demo.main import statement
from fa_rollout.demo.plan import NUM_RANKS, TASKS, prepare
from fa_rollout.demo.view import DemoView

BOOKS = {"taken": 20, "trained": 12, "filtered": 3, "failed": 1, "dropped": 2, "returned": 2}


def figures(step: int, reward: float = 0.5) -> DemoStep:
    return DemoStep(
        step=step,
        reward=reward,
        entropy=1.0,
        staleness=1,
        idle=0.1,
        tokens_per_s=1234.0,
        ring_fill=0.25,
        example="8352= 2358",
    )


def test_a_line_is_read_when_it_is_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    reader = FiguresReader(path)
    assert reader.read() == []
    log = FiguresLog(path)
    log.write(figures(0))
    with path.open("ab") as file:
        file.write(b'{"step": 1')
    assert [f.step for f in reader.read()] == [0]
    with path.open("ab") as file:
        file.write(b"\n")
    log.close()
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_view_shows_every_figure(is_terminal: bool, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    log = FiguresLog(tmp_path / "steps.jsonl")
    with DemoView(tmp_path / "steps.jsonl", 40, console) as view:
        view.tick()
        for step in range(40):
            log.write(figures(step))
        view.tick()
        view.say("a word")
    log.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("reward", "0.500", "1,234", "10%", "25%", "staleness", "a word"):
        assert word in text
    assert len(view.steps) == 40


def test_without_a_terminal_lines_are_few_and_fit(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    log = FiguresLog(tmp_path / "steps.jsonl")
    with DemoView(tmp_path / "steps.jsonl", 200, console):
        for step in range(200):
            log.write(figures(step))
    log.close()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 22
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].split()[0] == "200"


def test_sparkline_keeps_the_course_and_the_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([i / 99 for i in range(100)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1.0, 2.0]) == "▁█"


def test_smoothing_is_a_mean_of_the_last_values() -> None:
    assert smooth([1.0, 3.0, 5.0], over=2) == [1.0, 2.0, 4.0]


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    draw([0.1, 0.2, 0.9], [0, 1, 1], tmp_path / "curve.png", title="it rises")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_statement_adds_up_or_says_what_is_missing() -> None:
    assert statement(BOOKS).endswith("nothing was lost")
    assert "3 ARE MISSING" in statement(BOOKS | {"taken": 23})


def test_a_prepared_folder_is_a_whole_run(tmp_path: Path) -> None:
    plan = prepare(tmp_path / 'it\'s "here"', model="tiny", seed=1, num_steps=7, staleness=3, url=None)
    config = load(plan.config)
    assert config.rollout.num_steps == 7
    assert config.rollout.staleness == 3
    assert config.trainer.num_ranks == NUM_RANKS
    assert (Path(config.data.path)).read_text().count("\n") == TASKS["tiny"].num_prompts
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (Path(str(config.engine.model)) / file).is_file()


def test_a_running_engine_is_used_by_its_address(tmp_path: Path) -> None:
    plan = prepare(tmp_path, model="tiny", seed=0, num_steps=None, staleness=None, url="http://127.0.0.1:3")
    config = load(plan.config)
    assert config.engine.urls == ["http://127.0.0.1:3"]
    assert config.rollout.num_steps == TASKS["tiny"].num_steps


def test_a_real_sglang_is_started_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setenv(sglang.VENV_VARIABLE, str(tmp_path))
    launch = sglang.launch_section()
    plan = prepare(
        tmp_path / "demo", model="tiny", seed=0, num_steps=None, staleness=None, url=None, launch=launch
    )
    config = load(plan.config)
    assert config.launch.server == "sglang"
    assert str(config.launch.python) == str(python)
    assert config.launch.arguments == [*sglang.CPU_SETTINGS]
    assert config.launch.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert str(config.engine.model) == str(plan.model)
