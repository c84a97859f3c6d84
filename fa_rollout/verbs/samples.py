"""`fa-rollout-proc samples`: what a run wrote, and what became of it."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fa_rollout.verbs.configured import path, positive

_DESCRIPTION = """\
Shows samples of a run: prompt and answer as text, the parts that are not trained in ⟦ ⟧, where a weight
version begins as ‹v3›, rewards, lengths, and what became of each: the step that trained it and how stale it
was then, or why it failed or was filtered. RUN_DIR is what run.output_dir names; the run may still go on."""
_EPILOG = """\
examples:
  fa-rollout-proc samples out/run --worst            the lowest rewards
  fa-rollout-proc samples out/run --failed           why groups failed
  fa-rollout-proc samples out/run --step 12 --best --limit 3
  fa-rollout-proc samples out/run --group 40 --full
  fa-rollout-proc samples out/run --json --limit 1000 | jq .reward"""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `samples`."""
    parser = verbs.add_parser(
        "samples",
        help="see what a run wrote: prompts, answers, rewards, and what became of them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=path, help="output folder of a run")
    order = parser.add_mutually_exclusive_group()
    for name, text in (
        ("worst", "lowest rewards first"),
        ("best", "highest rewards first"),
        ("longest", "longest answers first"),
        ("stale", "stalest first, of those that were trained"),
        ("newest", "the latest first (default)"),
    ):
        order.add_argument(f"--{name}", dest="order", action="store_const", const=name, help=text)
    fates = parser.add_argument_group("of these only (several: any of them)")
    for name in ("trained", "failed", "filtered", "dropped"):
        fates.add_argument(f"--{name}", dest="fates", action="append_const", const=name)
    parser.add_argument("--step", type=int, metavar="N", help="those that this step trained")
    parser.add_argument("--group", type=int, metavar="G", help="those of one group")
    parser.add_argument("--limit", type=positive, default=5, metavar="N", help="at most so many (default: 5)")
    parser.add_argument("--full", action="store_true", help="long texts as a whole")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with token ids")
    parser.add_argument(
        "--launch", type=int, metavar="K", help="of several in the folder (default: the last)"
    )
    parser.add_argument("--tokenizer", type=path, metavar="FOLDER", help="where the configuration names none")
    parser.set_defaults(call=call, takes_command=False, order="newest", fates=None)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print samples."""
    from rich.console import Console

    from fa_rollout.records.folder import choose, launches, tokenizer_of
    from fa_rollout.records.samples import Choice, Fate, Order, select
    from fa_rollout.records.view import as_json, show
    from trainer_hook.printable import printable_json

    history = choose(launches(options.folder), options.launch)
    choice = Choice(
        order=Order(options.order),
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
        return "no sample of this launch is of that kind"
    return f"{folder} holds no samples: the run keeps none (run.samples), or has written none yet"
