"""`fa-rollout-proc simulate`: predicts a run without engines, in about a second."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa_rollout.config import ConfigError, load, to_dict
from fa_rollout.verbs.configured import add_arguments, configuration, path, positive, seconds

if TYPE_CHECKING:
    from fa_rollout.simulation.scenario import Scenario

_STEPS = 60
_MOST_TOKENS = 1 << 17
"""Longest answer, unless the configuration sets a lower limit."""
_DESCRIPTION = """\
Predicts trainer idle time, staleness, throughput and step time in about a second. Runs the hub's flow
control on a virtual clock with simulated engines (a decode rate and a number of slots) and a simulated
trainer (a step time). Configuration keys come from CONFIG or flags, the rest from a recorded run (--like)
or options. Times are seconds or text such as 500ms, 40s, 2m."""
_EXAMPLES = """\
examples:
  fa-rollout-proc simulate --train-s 40s --engines 4 --concurrency 64 --tokens-per-s 60 --lengths lengths.txt
  fa-rollout-proc simulate --like out/run --rollout.staleness 1
  fa-rollout-proc simulate run.toml --like out/run --sweep staleness=0..8 engines=1,2,4 --picture sweep.svg

--sweep accepts staleness, policy, engines, concurrency, interval, surplus, partial, groups_per_step,
samples_per_group, rejection, tokens_per_s, total_tokens_per_s, prefill_s, reward_s, train_s, write_s,
update_s, ring_bytes, prompt_tokens, steps and seed."""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `simulate`."""
    parser = verbs.add_parser(
        "simulate",
        help="predict trainer idle time, staleness and throughput",
        usage="fa-rollout-proc simulate [CONFIG] [--SECTION.KEY VALUE ...] [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add_arguments(parser)
    parser.add_argument(
        "--like",
        metavar="DIR",
        type=path,
        help="take lengths and times from the run with this run.output_dir",
    )
    engines = parser.add_argument_group("engines")
    engines.add_argument(
        "--engines", type=positive, metavar="N", dest="num_engines", help="number of engines"
    )
    engines.add_argument(
        "--concurrency", type=positive, metavar="N", dest="num_slots", help="concurrent requests per engine"
    )
    engines.add_argument(
        "--tokens-per-s", type=float, metavar="X", help="decode rate of one request, in tokens/s"
    )
    engines.add_argument(
        "--total-tokens-per-s",
        type=float,
        metavar="X",
        help="largest decode rate of one engine, in tokens/s; 0: no limit",
    )
    engines.add_argument(
        "--prefill-s", type=seconds, metavar="T", help="time from a request to its first token"
    )
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--lengths",
        metavar="HOW",
        help="answer lengths in tokens: lognormal:MEDIAN:SIGMA, or a file with one number per line "
        "(default: lognormal with a median of sampling.max_new_tokens / 4 and a sigma of 0.8)",
    )
    answers.add_argument(
        "--rejection", type=float, metavar="X", help="share of groups that the filter rejects, from 0 to 1"
    )
    answers.add_argument("--reward-s", type=seconds, metavar="T", help="time to score a group")
    trainer = parser.add_argument_group("trainer")
    trainer.add_argument(
        "--train-s", type=seconds, metavar="T", help="time of a training step, without waits and updates"
    )
    trainer.add_argument(
        "--write-s", type=seconds, metavar="T", help="time to write weights while engines keep running"
    )
    trainer.add_argument(
        "--update-s", type=seconds, metavar="T", help="time that engines pause for an update"
    )
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help=f"steps per simulated run (default: those of the run, at most {_STEPS})",
    )
    simulation.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="average the results over N runs (default: 1)"
    )
    simulation.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUES",
        help="simulate every combination of values; VALUES is 0..8 or 1,2,4",
    )
    simulation.add_argument(
        "--picture",
        type=path,
        metavar="FILE",
        help="plot the sweep to an .svg or .png file (needs matplotlib)",
    )
    simulation.add_argument("--json", type=path, metavar="FILE", help="write the results as JSON")
    parser.set_defaults(call=call)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Simulate, and return the exit code."""
    try:
        from fa_rollout.simulation import sweep, table
    except ImportError as error:
        raise ConfigError(f"simulate needs simpy ({error}): pip install 'fa-rollout[simulation]'") from None
    base = scenario(options)
    sweeps = sweep.parse(options.sweep)
    if options.picture is not None and not sweeps:
        raise ConfigError("--picture needs a sweep: add --sweep, such as --sweep staleness=0..8")
    rows = list(sweep.play(base, sweeps, num_seeds=options.seeds))
    table.show(base, sweeps, rows)
    if options.json is not None:
        found = [{"setting": row.setting, "figures": row.figures} for row in rows]
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None:
        from fa_rollout.simulation.picture import draw

        draw(rows, sweeps, options.picture)
    return 0


def scenario(options: argparse.Namespace) -> "Scenario":
    """The simulated run: a recorded or default run, changed by the configuration, then by the options.

    Raises:
        ConfigError: a file cannot be used, or a rule is broken.
    """
    from fa_rollout.simulation.scenario import Scenario, lengths_of_file, lognormal_lengths

    base = Scenario()
    if options.like is not None:
        from fa_rollout.simulation.recorded import scenario_of

        base = scenario_of(options.like)
    if options.config is None:
        config = load(None, _over(to_dict(base.config()), options.changes))
    else:
        config = configuration(options)
    base = base.like(config)
    is_cut = options.config is not None or "sampling" in options.changes
    most = config.sampling.max_new_tokens if is_cut else _MOST_TOKENS
    if is_cut and options.like is None:
        base = replace(base, lengths=lognormal_lengths(most / 4, 0.8, 1, most))
    changes: dict[str, Any] = {"num_steps": options.steps or min(base.num_steps, _STEPS)}
    for name in _OPTIONS:
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    if options.lengths is not None:
        kind, *numbers = options.lengths.split(":")
        if kind == "lognormal":
            changes["lengths"] = lognormal_lengths(*_two(numbers, options.lengths), 1, most)
        else:
            changes["lengths"] = lengths_of_file(Path(options.lengths), most)
    return replace(base, **changes)


_OPTIONS = (
    "num_engines",
    "num_slots",
    "tokens_per_s",
    "total_tokens_per_s",
    "prefill_s",
    "rejection",
    "reward_s",
    "train_s",
    "write_s",
    "update_s",
)


def _two(texts: list[str], whole: str) -> tuple[float, float]:
    try:
        median, sigma = map(float, texts)
    except ValueError:
        raise ConfigError(f"--lengths must be lognormal:MEDIAN:SIGMA or a file, found {whole!r}") from None
    return median, sigma


def _over(tree: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: tree.get(name, {}) | changes.get(name, {}) for name in tree.keys() | changes.keys()}
