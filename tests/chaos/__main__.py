"""`python -m tests.chaos --runs N --seed S`: storms over many jobs, each checked to the last token."""

import argparse
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.chaos import ledger, truth
from tests.chaos.job import POLICIES, PUBLISHERS, Job
from tests.chaos.storm import Account, Storm


def weather(
    folder: Path,
    *,
    seed: int,
    num_steps: int,
    num_strikes: int,
    policy: str | None = None,
    publish: str | None = None,
    router: bool | None = None,
) -> Account:
    """One job from its first step to its last, through a storm; then everything is checked.

    Raises:
        AssertionError: a rule is broken; the folder has the log, the ranks' notes and the launches' output.
    """
    with Job(folder, num_steps=num_steps, seed=seed, policy=policy, publish=publish, router=router) as job:
        account = Storm(job, seed=seed, num_strikes=num_strikes).run()
        settled = ledger.check(truth.read_events(job.folder))
        samples = truth.trained_samples(job)
        truth.check_conservation(job, samples, settled)
        truth.check_epochs(job, samples)
        truth.check_truth(job, samples)
        left = [path.name for path in (job.folder / "tmp").iterdir() if path.name.startswith("fa_rollout-")]
        assert len(left) <= account.struck["launcher SIGKILL"], f"folders of dead runs are left: {left}"
        assert job.policy != "wait" or not settled, f"under wait all is trained: {settled}"
        account.untrained.update(re.sub(r"\d+", "N", why)[:100] for why in settled.values())
    return account


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="jobs, each trained to its end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24, help="of each job")
    parser.add_argument("--strikes", type=int, default=12, help="kills and stops in each job")
    parser.add_argument("--policy", choices=sorted(set(POLICIES)), help="of all jobs (default: by seed)")
    parser.add_argument("--publish", choices=sorted(set(PUBLISHERS)), help="of all jobs (default: by seed)")
    parser.add_argument("--router", action=argparse.BooleanOptionalAction, help="before the engines")
    parser.add_argument("--keep", type=Path, help="folder for the files of failed jobs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended on the way out
    keep = options.keep or Path(tempfile.gettempdir(), "fa_rollout_chaos")
    struck: Counter[str] = Counter()
    untrained: Counter[str] = Counter()
    exits: Counter[int] = Counter()
    num_failed = 0
    for seed in range(options.seed, options.seed + options.runs):
        folder, started_s = keep / str(seed), time.monotonic()
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
            )
        except Exception:
            num_failed += 1
            print(f"seed {seed} failed, its files are in {folder}", flush=True)
            traceback.print_exc()
            continue
        shutil.rmtree(folder)
        struck += account.struck
        untrained += account.untrained
        exits += account.exits
        took_s = time.monotonic() - started_s
        print(f"seed {seed} took_s={took_s:.0f} launches={account.num_launches} kills={account.num_kills}")
        sys.stdout.flush()
    num_kills = sum(number for name, number in struck.items() if "KILL" in name)
    print(f"runs={options.runs} failed={num_failed} kills={num_kills} struck={dict(sorted(struck.items()))}")
    print(f"exits={dict(sorted(exits.items()))} untrained={dict(untrained)}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
