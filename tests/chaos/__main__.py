"""`python -m tests.chaos --jobs N --seed S`: storms over many jobs, each checked to the last token.

Figures of finished jobs are added up in `results.jsonl` of the folder that `--keep` names; the same command
goes on where it was interrupted.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos import ledger, truth
from tests.chaos.job import POLICIES, PUBLISHERS, Job
from tests.chaos.storm import Account, Storm


def weather(folder: Path, *, seed: int, num_steps: int, num_strikes: int, **kind: Any) -> Account:
    """One job from its first step to its last, through a storm; then everything is checked.

    `kind`: as `Job` takes it.

    Raises:
        AssertionError: a rule is broken; the folder has the log, the ranks' notes, the engines' journals and
            the launches' output.
    """
    with Job(folder, num_steps=num_steps, seed=seed, **kind) as job:
        account = Storm(job, seed=seed, num_strikes=num_strikes).run()
        samples = truth.trained_samples(job)
        if account.has_whole_log:
            settled = ledger.check(truth.read_events(job.folder))
            truth.check_ends(job, settled)
            truth.check_conservation(job, samples, settled)
            account.untrained.update(re.sub(r"\d+", "N", why)[:100] for why in settled.values())
        else:
            truth.check_conservation(job, samples, None)
        truth.check_epochs(job, samples)
        truth.check_truth(job, samples)
        left = [path.name for path in (job.folder / "tmp").iterdir() if path.name.startswith("fa_rollout-")]
        assert len(left) <= account.struck["launcher SIGKILL"], f"folders of dead runs are left: {left}"
        account.num_samples = len(samples)
        account.struck.update(f"user code {mark['function']} {mark['fault']}" for mark in truth.marks(job))
    return account


SORTS = ("kills", "stops", "engine faults", "user faults", "full disks")


class Results:
    """Jobs that are over, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._by_seed: dict[int, dict[str, Any]] = {one["seed"]: one for one in map(json.loads, lines)}

    def has(self, seed: int) -> bool:
        return seed in self._by_seed

    def add(self, seed: int, account: Account | None, took_s: float) -> None:
        """A job's end; None: it broke a rule."""
        one: dict[str, Any] = {"seed": seed, "failed": account is None, "took_s": took_s}
        if account is not None:
            one |= {"struck": account.struck, "exits": account.exits, "untrained": account.untrained}
            one |= {"launches": account.num_launches, "samples": account.num_samples}
        self._by_seed[seed] = one = json.loads(json.dumps(one))
        with self._path.open("a") as file:
            file.write(json.dumps(one) + "\n")

    @property
    def num_failed(self) -> int:
        return sum(one["failed"] for one in self._by_seed.values())

    def closing(self) -> str:
        """All jobs in one line."""
        struck = self._sum("struck")
        sorts = Counter(dict.fromkeys(SORTS, 0))
        for name, number in struck.items():
            sorts[_sort(name)] += number
        whole = [one for one in self._by_seed.values() if not one["failed"]]
        launches, samples = (sum(one[name] for one in whole) for name in ("launches", "samples"))
        words = [
            f"jobs={len(self._by_seed)} failed={self.num_failed} faults={sum(struck.values())}",
            f"({', '.join(f'{number} {sort}' for sort, number in sorts.items())})",
            f"launches={launches} samples={samples}",
            f"seconds={sum(one['took_s'] for one in self._by_seed.values()):.0f}",
        ]
        if not self.num_failed:
            words.append("lost=0 repeated=0 unanswered=0 left=0")
        return " ".join(words)

    def details(self) -> str:
        """What struck, how launches ended, why groups were not trained."""
        parts = ("struck", "exits", "untrained")
        return "\n".join(f"{part}={dict(sorted(self._sum(part).items()))}" for part in parts)

    def _sum(self, part: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for one in self._by_seed.values():
            total.update(one.get(part, {}))
        return +total


def _sort(name: str) -> str:
    if "full" in name:
        return "full disks"
    if "SIGSTOP" in name:
        return "stops"
    if "SIG" in name:
        return "kills"
    return "user faults" if name.startswith("user code") else "engine faults"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10, help="each trained to its end")
    parser.add_argument("--seconds", type=float, help="begin no job after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--steps", type=int, default=24, help="of each job")
    parser.add_argument(
        "--strikes", type=int, default=16, help="faults in each job, beside those of user code"
    )
    parser.add_argument("--policy", choices=sorted(set(POLICIES)), help="of all jobs (default: by seed)")
    parser.add_argument("--publish", choices=sorted(set(PUBLISHERS)), help="of all jobs (default: by seed)")
    parser.add_argument("--router", action=argparse.BooleanOptionalAction, help="before the engines")
    parser.add_argument("--user-faults", action=argparse.BooleanOptionalAction, help="in user code")
    parser.add_argument("--keep", type=Path, help="folder for results, and the files of failed jobs")
    parser.add_argument("--again", action="store_true", help="forget earlier results of that folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended on the way out
    keep = options.keep or Path(tempfile.gettempdir(), "fa_rollout_chaos")
    keep.mkdir(parents=True, exist_ok=True)
    if options.again:
        (keep / "results.jsonl").unlink(missing_ok=True)
    results, began_s = Results(keep / "results.jsonl"), time.monotonic()
    for seed in range(options.seed, options.seed + options.jobs):
        if options.seconds is not None and time.monotonic() - began_s > options.seconds:
            break
        if not results.has(seed):
            _job(results, keep / str(seed), seed, options)
    print(results.details())
    print(results.closing())
    return 1 if results.num_failed else 0


def _job(results: Results, folder: Path, seed: int, options: argparse.Namespace) -> None:
    started_s, account = time.monotonic(), None
    shutil.rmtree(folder, ignore_errors=True)
    try:
        account = weather(
            folder,
            seed=seed,
            num_steps=options.steps,
            num_strikes=options.strikes,
            policy=options.policy,
            publish=options.publish,
            router=options.router,
            user_faults=options.user_faults,
        )
    except Exception:
        print(f"seed {seed} failed, its files are in {folder}", flush=True)
        traceback.print_exc()
    took_s = time.monotonic() - started_s
    results.add(seed, account, took_s)
    if account is not None:
        shutil.rmtree(folder)
        num_faults = sum(account.struck.values())
        print(
            f"seed {seed} took_s={took_s:.0f} launches={account.num_launches} faults={num_faults}", flush=True
        )


if __name__ == "__main__":
    sys.exit(main())
