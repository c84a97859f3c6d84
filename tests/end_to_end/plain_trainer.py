"""A rank that trains nothing: it reads each batch, publishes, and writes down what it got.

    python -m tests.end_to_end.plain_trainer FOLDER

In: the run of its environment, and FOLDER/model, whose weights it publishes as they are. Out: a line of
FOLDER/steps.jsonl for each step; no step ends while FOLDER/hold exists.
"""

import json
import shutil
import sys
import time
from pathlib import Path

from trainer_hook import EndOfData, TrainerHook

TRAIN_S = 0.05


def main(folder: Path) -> None:
    with TrainerHook.attach() as hook, (folder / "steps.jsonl").open("a") as notes:
        while True:
            try:
                with hook.next_batch() as batch:
                    groups = [[sample.group, sample.member] for sample in batch.samples]
                    staleness = max(sample.staleness or 0 for sample in batch.samples)
                    while (folder / "hold").exists():
                        time.sleep(TRAIN_S)
                    time.sleep(TRAIN_S)
                with hook.update_weights() as update:
                    shutil.copy(folder / "model" / "model.safetensors", update.path)
                    update.push(update.path)
            except EndOfData:
                return
            line = {"step": batch.step, "version": batch.version, "samples": groups, "staleness": staleness}
            notes.write(json.dumps(line) + "\n")
            notes.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
