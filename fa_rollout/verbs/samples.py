"""`fa-rollout-proc samples`: a run's prompts and answers, and what happened to them."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fa_rollout.verbs.configured import path, positive

_DESCRIPTION = """\
Shows samples of a run: prompt and answer as text, rewards, lengths, and what happened to each sample: the
step that trained it and its staleness, or why it failed or was filtered. ⟦ ⟧ encloses text that is not
trained, and ‹v3› marks where weight version 3 began. RUN_DIR is the run's run.output_dir; the run may still
be active."""
_EPILOG = """\
examples:
  fa-rollout-proc samples out/run --worst            lowest rewards first
  fa-rollout-proc samples out/run --failed           failed groups and their errors
  fa-rollout-proc samples out/run --step 12 --best --limit 3
  fa-rollout-proc samples out/run --group 40 --full
  fa-rollout-proc samples out/run --json --limit 1000 | jq .reward"""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `samples`."""
    parser = verbs.add_parser(
        "samples",
        help="show a run's prompts, answers and rewards, and what happened to them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=path, help="output folder of the run")
    order = parser.add_mutually_exclusive_group()
    for name, text in (
        ("worst", "lowest rewards first"),
        ("best", "highest rewards first"),
        ("longest", "longest answers first"),
        ("stale", "trained samples, stalest first"),
        ("newest", "newest first (default)"),
    ):
        order.add_argument(f"--{name}", dest="order", action="store_const", const=name, help=text)
    fates = parser.add_argument_group("show only samples that were (several flags: any of them)")
    for name in ("trained", "failed", "filtered", "dropped"):
        fates.add_argument(f"--{name}", dest="fates", action="append_const", const=name)
    parser.add_argument("--step", type=int, metavar="N", help="show samples that step N trained")
    parser.add_argument("--group", type=int, metavar="G", help="show samples of group G")
    parser.add_argument("--limit", type=positive, default=5, metavar="N", help="show at most N (default: 5)")
    parser.add_argument("--full", action="store_true", help="do not shorten long texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with token ids")
    parser.add_argument(
        "--launch", type=int, metavar="K", help="launch number, if the folder has several (default: the last)"
    )
    parser.add_argument(
        "--tokenizer", type=path, metavar="FOLDER", help="tokenizer folder, if the configuration sets none"
    )
    parser.set_defaults(call=call, order="newest", fates=None)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print samples."""
    from rich.console import Console

    from fa_rollout.records.folder import choose, launches, tokenizer_of
    from fa_rollout.records.samples import Choice, Fate, SampleOrder, select
    from fa_rollout.records.view import as_json, show
    from trainer_hook.printable import printable_json

    history = choose(launches(options.folder), options.launch)
    choice = Choice(
        order=SampleOrder(options.order),
        fates=frozenset(Fate(name) for name in options.fates or ()),
        step=options.step,
        group=options.group,
        limit=options.limit,
    )
    chosen = select(options.folder, history, choice)
    tokenizer = tokenizer_of(history, options.tokenizer)
    if options.json:
        for sample in chosen:
            text = json.dumps(as_json(sample, tokenizer), ensure_ascii=False, default=str)
            print(printable_json(text))
        return 0
    console = Console()
    show(console, chosen, tokenizer, is_full=options.full)
    if not chosen:
        console.print(_nothing(options.folder), soft_wrap=True)
    return 0


def _nothing(folder: Path) -> str:
    from fa_rollout.records.sample_file import files_of

    if files_of(folder):
        return "no sample of this launch matches"
    return f"{folder} has no samples: the run keeps none (run.samples) or has not written any yet"
