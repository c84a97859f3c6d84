"""The demo trainer's figures of a step, gathered from the batch and the hook.

In: a batch, then the hook after its update. Out: a line of `figures`. Invariant: ranks other than the first
write nothing and ask nothing.
"""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenizers import Tokenizer

from fa_rollout.demo.figures import DemoStep, FiguresLog
from trainer_hook import TrainerHook
from trainer_hook.batches.batch import Batch


class Reporter:
    """Writes figures to `path`; does nothing without one."""

    def __init__(self, path: Path | None, model: Path) -> None:
        self._log = None if path is None else FiguresLog(path)
        self._tokenizer = None if path is None else Tokenizer.from_file(str(model / "tokenizer.json"))
        self._seen: tuple[int, float, int | None, int, str] = (0, 0.0, None, 0, "")
        self._last_s = time.monotonic()

    def look(self, batch: Batch) -> None:
        """Inside the batch's block: what is gone after it."""
        if self._tokenizer is None:
            return
        sample = batch.samples[0]
        answer = self._tokenizer.decode(sample.response_tokens.tolist())
        example = " ".join(f"{_asked(sample.prompt)} {answer}".split())
        self._seen = (batch.step, batch.reward_mean, batch.staleness, batch.num_tokens_global, example)

    def write(self, hook: TrainerHook, entropy: float) -> None:
        """After the update of the same step."""
        if self._log is None:
            return
        step, reward, staleness, num_tokens, example = self._seen
        since_s, self._last_s = self._last_s, time.monotonic()
        statistics = hook.statistics()
        waited_s = statistics.wait_s - statistics.first_wait_s
        ring = statistics.hub["ring"]
        self._log.write(
            DemoStep(
                step=step,
                reward=reward,
                entropy=entropy,
                staleness=staleness,
                idle=waited_s / max(1e-9, waited_s + statistics.train_s),
                tokens_per_s=num_tokens / (self._last_s - since_s),
                ring_fill=ring["span_bytes"] / ring["bytes"],
                example=example,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()


def _asked(prompt: str) -> str:
    """The prompt as a person asked it: the last message, where it is a list of them in JSON."""
    return str(json.loads(prompt)[-1]["content"]) if prompt.startswith("[") else prompt
