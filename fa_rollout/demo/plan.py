"""What a demo run consists of: model, prompts, configuration, trainer command, all in one folder.

In: the command line's choices. Out: a `DemoPlan`, and the files that it names. Invariant: the folder alone is
enough to run the same again: the first lines of its run.toml say how.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa_rollout.demo import task
from fa_rollout.demo.smollm2 import smollm2_folder
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.process.private_files import make_private

NUM_RANKS = 2
_CONFIG = """\
# Written by fa-rollout-proc demo; run again with
#   fa-rollout-proc run {folder}/run.toml -- {command}
[data]
path = {data}
seed = {seed}

[rollout]
num_steps = {num_steps}
groups_per_step = {groups_per_step}
samples_per_group = {samples_per_group}
staleness = {staleness}

[sampling]
max_new_tokens = {max_new_tokens}
seed = {seed}

[reward]
function = "{reward}"
in_loop = true

[engine]
{engine}
tokenizer = {model}
{launch}
[ring]
bytes = "4MiB"

[trainer]
num_ranks = {num_ranks}
{micro_batch}

[run]
output_dir = {output}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, what it learns, and settings that work for it on two cores."""

    title: str
    model: Callable[[Path, int], Path]
    """Folder of the run and seed to folder of the model."""
    prompts: Callable[[int, int], list[dict[str, Any]]]
    reward: str
    num_prompts: int
    num_steps: int
    groups_per_step: int
    samples_per_group: int
    staleness: int
    max_new_tokens: int
    learning_rate: float
    entropy_weight: float
    max_tokens_per_micro_batch: int | None


def _tiny(folder: Path, seed: int) -> Path:
    return write_tiny_model(folder / "model", characters=task.CHARACTERS, seed=seed)


TASKS = {
    "tiny": Task(
        title="two layers from random weights learn to sort four digits",
        model=_tiny,
        prompts=task.sorting_prompts,
        reward="fa_rollout.demo.task:sorting_reward",
        num_prompts=4096,
        num_steps=200,
        groups_per_step=16,
        samples_per_group=16,
        staleness=2,
        max_new_tokens=task.NUM_DIGITS + 2,
        learning_rate=3e-3,
        entropy_weight=0.05,
        max_tokens_per_micro_batch=None,
    ),
    "smollm2": Task(
        title="SmolLM2-135M-Instruct on arithmetic",
        model=lambda folder, seed: smollm2_folder(),
        prompts=task.arithmetic_prompts,
        reward="fa_rollout.demo.task:arithmetic_reward",
        num_prompts=1024,
        num_steps=24,
        groups_per_step=4,
        samples_per_group=8,
        staleness=2,
        max_new_tokens=8,
        learning_rate=3e-5,
        entropy_weight=0.0,
        max_tokens_per_micro_batch=1024,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """A demo that is ready to run."""

    title: str
    folder: Path
    model: Path
    """Folder of the model."""
    num_steps: int
    command: list[str]
    """Of the trainer."""

    @property
    def config(self) -> Path:
        return self.folder / "run.toml"

    @property
    def figures(self) -> Path:
        return self.folder / "steps.jsonl"

    @property
    def scratch(self) -> Path:
        """For what libraries of the trainer leave in the temporary folder when it is killed."""
        return self.folder / "tmp"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


def prepare(
    folder: Path,
    *,
    model: str,
    seed: int,
    num_steps: int | None,
    staleness: int | None,
    url: str | None,
    launch: str = "",
) -> DemoPlan:
    """Write everything a run needs into `folder`, which may exist; figures of an older run go.

    `url`: of an engine that runs; None: the run starts one. `launch`: the configuration's section that says
    which, as TOML; empty: the embedded one.
    """
    chosen = TASKS[model]
    make_private(folder)
    for name in ("logs", "tmp"):
        make_private(folder / name)
    model_folder = chosen.model(folder, seed)
    rows = chosen.prompts(chosen.num_prompts, seed)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = DemoPlan(
        title=chosen.title,
        folder=folder,
        model=model_folder,
        num_steps=num_steps or chosen.num_steps,
        command=_command(folder, model_folder, chosen, seed),
    )
    plan.figures.unlink(missing_ok=True)
    engine = f"model = {_quoted(model_folder)}" if url is None else f"urls = [{_quoted(url)}]"
    text = _config(plan, chosen, seed=seed, staleness=staleness, engine=engine, launch=launch)
    plan.config.write_text(text)
    return plan


def _command(folder: Path, model: Path, chosen: Task, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "fa_rollout.ranks", str(NUM_RANKS)),
        *("-m", "fa_rollout.demo.train"),
        f"--model={model}",
        f"--figures={folder / 'steps.jsonl'}",
        f"--learning-rate={chosen.learning_rate}",
        f"--entropy-weight={chosen.entropy_weight}",
        f"--seed={seed}",
    ]


def _config(
    plan: DemoPlan, chosen: Task, *, seed: int, staleness: int | None, engine: str, launch: str
) -> str:
    limit = chosen.max_tokens_per_micro_batch
    return _CONFIG.format(
        folder=plan.folder,
        command=" ".join(plan.command),
        data=_quoted(plan.folder / "prompts.jsonl"),
        seed=seed,
        num_steps=plan.num_steps,
        groups_per_step=chosen.groups_per_step,
        samples_per_group=chosen.samples_per_group,
        staleness=chosen.staleness if staleness is None else staleness,
        max_new_tokens=chosen.max_new_tokens,
        reward=chosen.reward,
        engine=engine,
        launch=launch,
        model=_quoted(plan.model),
        num_ranks=NUM_RANKS,
        micro_batch="" if limit is None else f"max_tokens_per_micro_batch = {limit}",
        output=_quoted(plan.folder),
    )


def _quoted(value: object) -> str:
    """A TOML string: JSON's escapes are a part of TOML's."""
    return json.dumps(str(value))
