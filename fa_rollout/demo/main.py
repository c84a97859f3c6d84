"""`fa-rollout-proc demo`: start a small run, show it live, and account for every prompt.

In: the command line's choices. Out: an exit code, and a folder with model, data, configuration, logs, figures
and the reward curve. Invariant: what is printed at the end is counted by the hub, not by the demo.
"""

import argparse
import os
import shlex
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fa_rollout.config import ConfigError, load
from fa_rollout.demo import sglang
from fa_rollout.demo.curve import draw, sparkline
from fa_rollout.demo.plan import DemoPlan, prepare
from fa_rollout.demo.view import COLUMNS, DemoView, cells
from fa_rollout.launcher.ending import EXIT_REFUSED, INTERRUPTED_CODES
from fa_rollout.launcher.launch import LaunchHooks, ProcessEnded, launch
from fa_rollout.preflight import is_fit
from trainer_hook.printable import printable

_SETTLED = ("trained", "filtered", "failed", "dropped")
_AVERAGED_OVER = 10
_LOG_LINES = 25
_FIGURES_WIDTH = 66


def demo(options: argparse.Namespace) -> int:
    """Run the demo; the exit code is the run's."""
    console = Console(stderr=False)
    url, is_sglang = _url(options.engine), options.engine == "sglang"
    folder = Path(options.output or f"out/demo-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    plan = prepare(
        folder,
        model=options.model,
        seed=options.seed,
        num_steps=options.steps,
        staleness=options.staleness,
        url=url,
        launch=sglang.launch_section() if is_sglang else "",
    )
    _calm_environment(plan)
    config = load(plan.config)
    if not is_fit(config, plan.command):
        return EXIT_REFUSED
    console.print(f"[bold]{plan.title}[/bold]; everything is in {plan.folder}", soft_wrap=True)
    if is_sglang:
        console.print("starting SGLang (about half a minute)", soft_wrap=True)
    try:
        with DemoView(plan.figures, plan.num_steps, console) as view:
            # The view shows the progress already.
            hooks = LaunchHooks(say=view.say, progress=lambda text: None, tick=view.tick, logs=plan.logs)
            ended = launch(config, plan.command, hooks=hooks)
    finally:
        shutil.rmtree(plan.scratch, ignore_errors=True)
    _conclude(console, plan, view, ended)
    return ended.exit_code


def _url(engine: str) -> str | None:
    """Of an engine that runs; None: the launcher starts one."""
    if engine in ("embedded", "sglang"):
        return None
    kind, _, url = engine.partition(":")
    if kind != "sglang" or not url.startswith("http"):
        raise ConfigError("--engine must be embedded, sglang, or sglang:URL of a running one, such as "
                          f"sglang:http://127.0.0.1:30000, found {engine!r}")  # fmt: skip
    return url


def _calm_environment(plan: DemoPlan) -> None:
    """For children: two ranks on two cores, nothing beyond this machine, nothing outside the folder."""
    os.environ["TMPDIR"] = str(plan.scratch)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _conclude(console: Console, plan: DemoPlan, view: DemoView, ended: ProcessEnded) -> None:
    if view.steps:
        console.print(_table(view, width=max(16, console.width - _FIGURES_WIDTH)))
        rewards = [figures.reward for figures in view.steps]
        curve = plan.folder / "curve.png"
        draw(rewards, [figures.staleness for figures in view.steps], curve, title=plan.title)
        first, last = rewards[:_AVERAGED_OVER], rewards[-_AVERAGED_OVER:]
        console.print(
            f"reward {sum(first) / len(first):.2f} -> {sum(last) / len(last):.2f} in {len(rewards)} steps, "
            f"{view.elapsed_s:.0f} s  {sparkline(rewards, width=40)}\ncurve: {curve}",
            soft_wrap=True,
            highlight=False,
        )
    if ended.counts is not None:
        console.print(statement(ended.counts), soft_wrap=True, highlight=False)
    if view.steps:
        folder = shlex.quote(str(plan.folder))
        console.print(
            f"the whole run on a page: fa-rollout-proc report {folder}\n"
            f"what the model wrote:    fa-rollout-proc samples {folder} --best",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    if ended.exit_code and ended.exit_code not in INTERRUPTED_CODES:
        _show_log(console, plan)


def statement(counts: dict[str, int]) -> str:
    """The number of prompts by outcome, and whether every prompt is accounted for."""
    settled = ", ".join(f"{counts[name]} {name}" for name in _SETTLED)
    accounted = sum(counts[name] for name in (*_SETTLED, "returned"))
    verdict = (
        "nothing was lost" if accounted == counts["taken"] else f"{counts['taken'] - accounted} ARE MISSING"
    )
    return f"{counts['taken']} prompts taken = {settled}, {counts['returned']} back in the data: {verdict}"


def _table(view: DemoView, *, width: int) -> Table:
    """Up to ten steps, evenly spaced; `width` characters for the end of a sample."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, width in COLUMNS.items():
        table.add_column(name, justify="right", min_width=width)
    table.add_column("sample", no_wrap=True)
    num_rows = min(10, len(view.steps))
    for row in range(num_rows):
        figures = view.steps[(row + 1) * len(view.steps) // num_rows - 1]
        table.add_row(*cells(figures), Text(printable(figures.example[-width:])))
    return table


def _show_log(console: Console, plan: DemoPlan) -> None:
    """Print the trainer's last lines, and the folder of all logs."""
    log = plan.logs / "trainer.log"
    if log.is_file():
        lines = log.read_text(errors="replace").split("\n")[-_LOG_LINES:]
        console.print("\n".join(map(printable, lines)), markup=False, highlight=False, style="dim")
    console.print(f"logs: {plan.logs}", soft_wrap=True)
