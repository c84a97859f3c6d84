"""`fa-rollout-proc report`: a run on one HTML page."""

import argparse
from collections.abc import Sequence

from fa_rollout.verbs.configured import path

_DESCRIPTION = """\
Writes an HTML report of a run: what limited the run and what to change, the timeline, where the trainer's
time went, rewards, staleness, lengths, failures and a few samples. It is one self-contained file. RUN_DIR is
the run's run.output_dir; the run may still be active."""
_EPILOG = """\
examples:
  fa-rollout-proc report out/run                         writes out/run/report.html
  fa-rollout-proc report out/run --output week.html
  fa-rollout-proc report out/run --trace trace.json      also a trace for https://ui.perfetto.dev"""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `report`."""
    parser = verbs.add_parser(
        "report",
        help="write an HTML report of a run: diagnosis, timeline, charts, samples",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=path, help="output folder of the run")
    parser.add_argument(
        "--output", type=path, metavar="FILE", help="HTML file to write (default: RUN_DIR/report.html)"
    )
    parser.add_argument("--trace", type=path, metavar="FILE", help="also write the timeline as a trace file")
    parser.add_argument(
        "--launch", type=int, metavar="K", help="launch number, if the folder has several (default: the last)"
    )
    parser.add_argument(
        "--tokenizer", type=path, metavar="FOLDER", help="tokenizer folder, if the configuration sets none"
    )
    parser.set_defaults(call=call)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Write the page, and print its diagnosis."""
    from fa_rollout.config import ConfigError
    from fa_rollout.process.private_files import write_private
    from fa_rollout.records.folder import NoRecords, choose, launches, tokenizer_of
    from fa_rollout.report import trace
    from fa_rollout.report.looks import seen
    from fa_rollout.report.page import page
    from fa_rollout.report.sample_cards import Shown, chosen
    from fa_rollout.report.summary import summarize

    found = launches(options.folder)
    history = choose(found, options.launch)
    holds, engines = seen(options.folder, history.run)
    summary = summarize(history, holds)
    samples: list[Shown] = []
    without = "The run kept no samples (run.samples) or has not written any yet."
    try:
        samples = chosen(options.folder, history, tokenizer_of(history, options.tokenizer))
    except (ConfigError, NoRecords) as error:
        without = f"Samples cannot be shown: {error}"
    output = options.output or options.folder / "report.html"
    text = page(summary, samples, engines=engines, without_samples=without)
    write_private(output, text)
    print(summary.verdict.headline[:1].upper() + summary.verdict.headline[1:])
    if len(found) > 1 and options.launch is None:
        print(f"the folder has {len(found)} launches; this is the last (--launch 1 is the first)")
    print(f"report: {output}")
    if options.trace is not None:
        trace.write(history, options.trace)
        print(f"trace: {options.trace} (open it in https://ui.perfetto.dev)")
    return 0
