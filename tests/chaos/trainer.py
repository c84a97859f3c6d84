"""A trainer that may be killed at any moment: two ranks that only write down what they were given.

    python -m tests.chaos.trainer FOLDER                  the agent, as torchrun is one
    python -m tests.chaos.trainer FOLDER RANK SIZE LIFE   a rank; LIFE begins with "r" if it is to resume

In: the run of the environment, and the checkpoint in FOLDER if there is one. Out: what each rank trained in
each step, `steps/LIFE-STEP-RANK.jsonl`, and `checkpoint.json` after each step: the hook's state, and which
life trained which step. A step counts if the checkpoint says so; the files of lost branches stay unread.
"""

import json
import os
import random
import secrets
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trainer_hook import TrainerHook
from trainer_hook.batches.batch import Batch
from trainer_hook.calls.update import WeightUpdate
from trainer_hook.errors import EndOfData, HookError, HubLost, PeerLost, WeightUpdateFailed

NUM_RANKS = 2
MAX_LIVES = 30
TRAIN_S = 0.05
EXIT_PEER_LOST = 3
PEER_GRACE_S = 5.0


def agent(folder: Path) -> int:
    """Start the ranks, and start all of them again when one is lost."""
    for _ in range(MAX_LIVES):
        resumes = (folder / "checkpoint.json").exists()  # once for all ranks: the first one soon writes it
        life = ("r" if resumes else "f") + secrets.token_hex(4)
        command = [sys.executable, "-m", "tests.chaos.trainer", str(folder)]
        ranks = [
            subprocess.Popen([*command, str(rank), str(NUM_RANKS), life], process_group=0)
            for rank in range(NUM_RANKS)
        ]
        codes = [_end_of_life(rank, ranks) for rank in ranks]
        if all(code == 0 for code in codes):
            return 0
        if all(code in (0, 1) for code in codes):
            return 1  # not by a lost rank: another life would end in the same way
    return 1


def _end_of_life(rank: "subprocess.Popen[bytes]", ranks: "list[subprocess.Popen[bytes]]") -> int:
    """The rank's exit code; one that outlives a lost peer for too long is ended."""
    lost_s = None
    while rank.poll() is None:
        time.sleep(0.02)
        if lost_s is None and any(other.poll() not in (None, 0) for other in ranks):
            lost_s = time.monotonic()
        if lost_s is not None and time.monotonic() - lost_s > PEER_GRACE_S:
            os.killpg(rank.pid, 9)
    return int(rank.wait())


class Checkpoint:
    """What a trainer saves: here its books are its only weights."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "checkpoint.json"
        self.state: dict[str, Any] | None = None
        self.history: list[tuple[int, str]] = []
        """(step, life that trained it)"""
        if self._path.exists():
            saved = json.loads(self._path.read_text())
            self.state, self.history = saved["state"], [tuple(entry) for entry in saved["history"]]

    def save(self, state: dict[str, Any]) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"state": state, "history": self.history}))
        partial.replace(self._path)


def rank(folder: Path, dp_rank: int, dp_size: int, life: str) -> int:
    """One rank's life; 0 at the end of the data."""
    try:
        with TrainerHook.attach(dp_rank=dp_rank, dp_size=dp_size) as hook:
            return _train(hook, folder, dp_rank, life)
    except EndOfData as end:
        _tell(folder, dp_rank, life, end)
        return 0
    except (PeerLost, HubLost, HookError) as error:
        _tell(folder, dp_rank, life, error)
        return EXIT_PEER_LOST if isinstance(error, PeerLost) else 1


def _train(hook: TrainerHook, folder: Path, dp_rank: int, life: str) -> int:
    checkpoint, push = Checkpoint(folder), _pusher(folder)
    if life.startswith("r"):
        assert checkpoint.state is not None
        hook.load_state_dict(checkpoint.state)
    elif dp_rank == 0:
        checkpoint.save(hook.state_dict())
    _publish(hook, push)  # engines may hold weights of an earlier launch
    dice = random.Random(f"{life}{dp_rank}")
    while True:
        with hook.next_batch(copy=dice.random() < 0.3) as batch:
            step = batch.step
            _write(folder / "steps" / f"{life}-{step}-{dp_rank}.jsonl", hook, batch)
            time.sleep(TRAIN_S * dice.random() * 2)
        _publish(hook, push)
        checkpoint.history.append((step, life))
        if dp_rank == 0:
            state = hook.state_dict(payload=dice.random() < 0.5, interrupt=dice.random() < 0.3)
            checkpoint.save(state)


def _pusher(folder: Path) -> Callable[[WeightUpdate], None]:
    """As the run's configuration wants weights to be pushed."""
    config = tomllib.loads((folder / "run.toml").read_text())
    return _push_files if config["trainer"]["publish"] == "disk" else _push_stream


def _push_files(update: WeightUpdate) -> None:
    if update.is_leader:
        save_file({"version": np.array([update.version])}, update.path / "model.safetensors")
    update.push(update.path)


def _push_stream(update: WeightUpdate) -> None:
    import torch  # which takes a rank seconds to start, so only where it is needed

    update.push({f"weight{place}": torch.full((8,), float(update.version)) for place in range(3)})


def _publish(hook: TrainerHook, push: Callable[[WeightUpdate], None]) -> None:
    """An engine that dies while it loads fails the update on every rank, so that all try again."""
    for attempt in range(20):
        try:
            with hook.update_weights() as update:
                push(update)
        except WeightUpdateFailed:
            time.sleep(0.1 * attempt)
        else:
            return
    raise WeightUpdateFailed("20 updates failed, one after the other")


def _write(path: Path, hook: TrainerHook, batch: Batch) -> None:
    lines = []
    for sample in batch.samples:
        arrays = sample.arrays
        lines.append(
            {
                "step": batch.step,
                "version": batch.version,
                "lineage": hook.lineage,
                "group": sample.group,
                "member": sample.member,
                "epoch": sample.epoch,
                "row": sample.prompt_index,
                "label": sample.label,
                "prompt_length": sample.prompt_length,
                "tokens": arrays.tokens.tolist(),
                "logprobs": arrays.logprobs.tolist(),
                "spans": [(span.version, span.end) for span in sample.version_spans],
                "finish": sample.finish_reason,
                "reward": sample.reward,
                "staleness": sample.staleness,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _tell(folder: Path, dp_rank: int, life: str, error: Exception) -> None:
    with (folder / "errors.jsonl").open("a") as file:
        note = {"t": time.monotonic(), "rank": dp_rank, "life": life}
        file.write(json.dumps({**note, "error": type(error).__name__, "text": str(error)}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(agent(Path(sys.argv[1])))
    sys.exit(rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
