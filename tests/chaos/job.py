"""A job that must be trained to its end, through as many launches as that takes.

In: a folder. Out: engines on fixed ports that are started again whenever they die, each with a journal of
what it sampled, and launches of the whole system below them. Nothing here kills anything; see `storm`.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import psutil

from fa_rollout.engines.tiny_model import write_tiny_model
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from tests.kit.scripted.journal import Entry

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
VOCAB_SIZE = 3 + len(CHARACTERS)
NUM_PROMPTS = 23
GROUPS_PER_STEP = 4
SAMPLES_PER_GROUP = 2
STALENESS = 2
MAX_NEW_TOKENS = 192
HEARTBEAT_S = 2.0
POLICIES = ("wait", "wait", "drop", "retry")
"""Those that bound staleness; a job has one of them, by its seed."""
PROTOCOLS: tuple[Literal["0.5.15", "0.5.23"], ...] = ("0.5.23", "0.5.15")
"""Engines that tell the version of each token, and such as do not."""
ROUTED = 0.25
"""Share of the jobs whose engines are behind a router, which is not struck."""
WITH_USER_FAULTS = 0.5
"""Share of the jobs whose own generate and reward functions misbehave; see `user_code`."""
FULL_OUTPUT = 0.15
"""Share of the launches whose output goes to a full disk."""
STALE_RESTARTS = 0.4
"""Share of the engines that come back between two launches with weights that they had before, and tell that
label. While a launch runs, a server that starts again tells what its command says, as SGLang does.
"""
PUBLISHERS = ("disk", "disk", "tensor")
"""How weights get to the engines: by files, or in a stream that no file holds."""
GRACE_S = 3.0

_CONFIG = """\
[data]
path = {prompts}
seed = {seed}
metadata_keys = ["marks"]
[rollout]
num_steps = {num_steps}
groups_per_step = {groups_per_step}
samples_per_group = {samples_per_group}
staleness = {staleness}
staleness_policy = "{policy}"
idle_timeout_s = 20
max_failure_rate = 0.6
{generate}
[sampling]
max_new_tokens = {max_new_tokens}
[reward]
function = "tests.chaos.user_code:reward"
num_workers = 2
timeout_s = 15
[engine]
urls = {urls}
router = {router}
tokenizer = {model}
request_timeout_s = 20
[ring]
bytes = "256KiB"
poison = true
checksum_payload = true
[trainer]
num_ranks = 2
max_tokens_per_micro_batch = 512
stall_s = 60
publish = "{publish}"
bucket_bytes = 64
[run]
output_dir = {folder}
grace_s = {grace_s}
heartbeat_s = {heartbeat_s}
generator_restarts = 100
"""


class Job:
    """Files and engines of one job."""

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int,
        seed: int,
        num_engines: int = 2,
        policy: str | None = None,
        publish: str | None = None,
        router: bool | None = None,
        user_faults: bool | None = None,
    ) -> None:
        """`policy`, `publish`, `router`, `user_faults`: None: by the seed."""
        self.folder, self.num_steps, self.seed = folder, num_steps, seed
        dice = random.Random(seed)
        by_seed = dice.choice(POLICIES)
        self.policy = policy or by_seed
        protocol = dice.choice(PROTOCOLS)
        publish_by_seed = dice.choice(PUBLISHERS)
        self.publish = publish or publish_by_seed
        has_router_by_seed = dice.random() < ROUTED
        self.has_router = has_router_by_seed if router is None else router
        has_user_faults_by_seed = dice.random() < WITH_USER_FAULTS
        self.has_user_faults = has_user_faults_by_seed if user_faults is None else user_faults
        self._dice = dice
        for name in ("steps", "tmp"):
            (folder / name).mkdir(parents=True)
        write_tiny_model(folder / "model", characters=CHARACTERS)
        self.prompts = [f"prompt {index} of job {seed}" for index in range(NUM_PROMPTS)]
        self.marks = folder / "marks.jsonl"
        marks = str(self.marks) if self.has_user_faults else ""
        rows = [
            json.dumps({"prompt": text, "label": str(row), "marks": marks})
            for row, text in enumerate(self.prompts)
        ]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        self._script = Script(
            vocab_size=VOCAB_SIZE,
            lengths=Lengths(kind="lognormal", tokens=30, sigma=0.9, low=1, high=MAX_NEW_TOKENS, seed=seed),
            protocol=protocol,
            tokens_per_s=300.0,
            update_s=0.02,
        )
        self.engines: list[ScriptedEngine] = []
        self.router: ScriptedEngine | None = None
        try:
            self.engines += [self._engine(place) for place in range(num_engines)]
            if self.has_router:
                self.router = ScriptedEngine.start(Script(workers=[engine.url for engine in self.engines]))
        except BaseException:
            self.close()
            raise
        self._write_config()

    def _engine(self, place: int, **changes: Any) -> ScriptedEngine:
        return ScriptedEngine.start(self._script, journal=str(self.journal(place)), **changes)

    def journal(self, place: int) -> Path:
        """What an engine sampled in all its lives."""
        return self.folder / f"journal-{place}.jsonl"

    def _write_config(self) -> None:
        text = _CONFIG.format(
            prompts=json.dumps(str(self.folder / "prompts.jsonl")),
            seed=self.seed,
            num_steps=self.num_steps,
            groups_per_step=GROUPS_PER_STEP,
            samples_per_group=SAMPLES_PER_GROUP,
            staleness=STALENESS,
            policy=self.policy,
            generate='generate = "tests.chaos.user_code:generate"' if self.has_user_faults else "",
            publish=self.publish,
            max_new_tokens=MAX_NEW_TOKENS,
            urls=json.dumps([engine.url for engine in ([self.router] if self.router else self.engines)]),
            router=json.dumps(self.has_router),
            model=json.dumps(str(self.folder / "model")),
            folder=json.dumps(str(self.folder)),
            grace_s=GRACE_S,
            heartbeat_s=HEARTBEAT_S,
        )
        (self.folder / "run.toml").write_text(text)

    def revive_engines(self, *, may_be_stale: bool = False) -> None:
        """Start each dead engine again, on its port."""
        for place, engine in enumerate(self.engines):
            if engine.process.poll() is not None:
                port = int(engine.url.rsplit(":", 1)[1])
                engine.stop()
                label = self._dice.choice(self._labels(place) or ["default"])
                is_stale = may_be_stale and self._dice.random() < STALE_RESTARTS
                self.engines[place] = self._engine(
                    place, port=port, weight_version=label if is_stale else "default"
                )

    def _labels(self, place: int) -> list[str]:
        """Of the weights that an engine has sampled with."""
        lines = self.journal(place).read_bytes().splitlines() if self.journal(place).exists() else []
        spans = [span for line in lines[-200:] for span in msgspec.json.decode(line, type=Entry).spans]
        return list(dict.fromkeys(label for label, _ in spans))

    def checkpoint(self) -> dict[str, Any] | None:
        path = self.folder / "checkpoint.json"
        loaded: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return loaded

    @property
    def is_trained(self) -> bool:
        """Whether the checkpoint covers the last step."""
        saved = self.checkpoint()
        return saved is not None and saved["state"]["step"] == self.num_steps

    def close(self) -> None:
        for engine in [*self.engines, *([self.router] if self.router else [])]:
            if engine.process.poll() is None:
                engine.process.kill()
            engine.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


PARTS = {
    "generator": "fa_rollout.generator",
    "hub": "fa_rollout.hub",
    "reward worker": "fa_rollout.rewards.workers.nurse",
    "rank": "tests.chaos.trainer",
    "agent": "tests.chaos.trainer",
}
"""A word of each part's command line."""


class Launch:
    """One launcher and all below it."""

    def __init__(self, job: Job, *, has_full_output: bool = False) -> None:
        """`has_full_output`: all that it and its children print meets a full disk."""
        self.job = job
        output = Path("/dev/full") if has_full_output else job.folder / "launches.log"
        self._log = output.open("ab", buffering=0)
        command = [sys.executable, "-m", "fa_rollout.cli", "run", str(job.folder / "run.toml")]
        self.process = subprocess.Popen(
            [*command, "--", sys.executable, "-m", "tests.chaos.trainer", str(job.folder)],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(job.folder / "tmp"), "XDG_RUNTIME_DIR": ""},
            start_new_session=True,
        )
        self.seen: dict[int, psutil.Process] = {}

    def look(self) -> None:
        """Remember who is below the launcher now, and below those who were."""
        roots = [*self.seen.values()]
        with contextlib.suppress(psutil.NoSuchProcess):
            roots.append(psutil.Process(self.process.pid))
        for root in roots:
            try:
                for process in root.children(recursive=True):
                    self.seen.setdefault(process.pid, process)
            except psutil.NoSuchProcess:
                continue

    def find(self, part: str) -> list[psutil.Process]:
        """The processes of a part that live now."""
        self.look()
        return [process for process in self.seen.values() if _is(part, process)]

    def left(self) -> list[str]:
        """What still lives of all that was ever seen, in words."""
        self.look()
        return [text for process in self.seen.values() if (text := _in_words(process)) is not None]

    def destroy(self) -> None:
        """End all that is left, after a failure."""
        self.look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in self.seen.values():
            if process.is_running():
                process.kill()
        self._log.close()


def _in_words(process: psutil.Process) -> str | None:
    """Number and command line; None when it has ended."""
    try:
        words = process.cmdline()
        is_alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # a zombie among them
        return None
    return f"{process.pid} {' '.join(words)[-120:]}" if is_alive else None


def _is(part: str, process: psutil.Process) -> bool:
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    if PARTS[part] not in words:
        return False
    is_agent = words.index(PARTS[part]) == len(words) - 2
    return part not in ("rank", "agent") or is_agent == (part == "agent")
