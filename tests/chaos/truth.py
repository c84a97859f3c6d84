"""What a finished job must have trained, from its checkpoint and what its ranks, engines and user code wrote.

Invariant checked: every group that was ever taken is trained once, or ended for a cause that user code wrote
down or that the staleness policy allows; every trained token, with its log-probability and its version, was
sampled by an engine for this sample, as the engine's own journal has it; no sample is staler than the bound.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fa_rollout.account.event_file import FILE_NAME, read
from fa_rollout.account.events import Event
from fa_rollout.data.order import epoch_order
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from tests.chaos.job import (
    GROUPS_PER_STEP,
    NUM_PROMPTS,
    SAMPLES_PER_GROUP,
    STALENESS,
    VOCAB_SIZE,
    Job,
)
from tests.chaos.trainer import NUM_RANKS
from tests.chaos.user_code import HARMLESS, reward_of
from tests.kit.scripted import EOS_ID, expected_ids, sequence_key
from tests.kit.scripted.journal import Entry

Trained = dict[str, Any]


def trained_samples(job: Job) -> list[Trained]:
    """Samples of the steps that the checkpoint covers, in order of steps."""
    saved = job.checkpoint()
    assert saved is not None
    steps = [step for step, _ in saved["history"]]
    assert steps == list(range(job.num_steps)), "each step is trained once, in order"
    return [
        json.loads(line)
        for step, life in saved["history"]
        for rank in range(NUM_RANKS)
        for line in (job.folder / "steps" / f"{life}-{step}-{rank}.jsonl").read_text().splitlines()
    ]


def check_conservation(job: Job, samples: Iterable[Trained], settled: dict[int, str] | None) -> None:
    """`settled`: groups that the log names as ended untrained, and how; None: the log is not whole."""
    saved = job.checkpoint()
    assert saved is not None
    state = saved["state"]
    keys = Counter((sample["group"], sample["member"]) for sample in samples)
    repeated = [key for key, number in keys.items() if number > 1]
    assert not repeated, f"trained more than once: {repeated}"
    groups = {group for group, _ in keys}
    assert len(keys) == len(groups) * SAMPLES_PER_GROUP, "groups are trained whole"
    assert len(groups) == job.num_steps * GROUPS_PER_STEP
    taken, unfinished = set(range(state["cursor"])), set(state["unfinished"])
    assert groups <= taken
    assert not groups & unfinished, f"trained and yet unfinished: {groups & unfinished}"
    ended = taken - groups - unfinished
    ends = state["ends"]
    assert len(ended) == ends["filtered"] + ends["failed"] + ends["dropped"], (ended, ends)
    if settled is not None:
        unnamed = ended - settled.keys()
        assert not unnamed, f"neither trained, nor unfinished, nor named by the log: {unnamed}"
    elif job.policy == "wait":
        unnamed = ended - {mark["group"] for mark in marks(job)}
        assert not unnamed, f"neither trained, nor unfinished, nor struck by user code: {unnamed}"
    assert ends["trained"] == len(groups)


def check_epochs(job: Job, samples: Iterable[Trained]) -> None:
    """Each row comes once an epoch, in the order of the seed."""
    for sample in samples:
        epoch, place = divmod(sample["group"], NUM_PROMPTS)
        order = epoch_order(NUM_PROMPTS, epoch, seed=job.seed, shuffle=True)
        assert (sample["epoch"], sample["row"]) == (epoch, int(order[place])), sample["group"]
        assert sample["label"] == str(sample["row"])


def check_ends(job: Job, settled: dict[int, str]) -> None:
    """Groups end untrained for a known cause: user code that misbehaved, or the staleness policy."""
    may_fail = {mark["group"] for mark in marks(job) if mark["fault"] not in HARMLESS}
    dropped = {group for group, why in settled.items() if why.startswith("dropped")}
    assert job.policy != "wait" or not dropped, f"nothing is dropped under wait: {dropped}"
    unexplained = {group: why for group, why in settled.items() if group not in may_fail | dropped}
    assert not unexplained, f"ended though no user code misbehaved: {unexplained}"


def marks(job: Job) -> list[dict[str, Any]]:
    """What user code wrote down before it misbehaved."""
    lines = job.marks.read_text().splitlines() if job.marks.exists() else []
    return [json.loads(line) for line in lines]


def check_truth(job: Job, samples: Iterable[Trained]) -> None:
    """Every token was sampled by an engine for this very sample, as the engines' own journals have it.

    Prompts, rewards and staleness are checked too; tokens also against the function that engines sample by.
    """
    tokenizer = Tokenizer.load(job.folder / "model")
    prompts = [_prompt_ids(tokenizer, text) for text in job.prompts]
    pieces = read_journals(job)
    for sample in samples:
        prompt = prompts[sample["row"]]
        tokens, length = sample["tokens"], sample["prompt_length"]
        assert tokens[:length] == prompt, f"the prompt of group {sample['group']}"
        key = sequence_key(np.asarray(prompt, np.int32))
        expected = expected_ids(key, length, len(tokens), VOCAB_SIZE).tolist()
        if sample["finish"] == "stop":
            expected[-1] = EOS_ID
        assert tokens[length:] == expected, f"the tokens of group {sample['group']}"
        found = pieces.get((sample["group"], sample["member"]), [])
        made = [piece for piece in found if piece.key == key]
        assert _is_made_of(sample, made), f"no engine sampled group {sample['group']}: {sample}, {made}"
        assert sample["reward"] == np.float32(reward_of(expected)), f"the reward of group {sample['group']}"
        assert sample["staleness"] is not None, "every engine tells versions"
        assert sample["staleness"] <= STALENESS, f"group {sample['group']} is too stale"
        oldest = min(version for version, _ in sample["spans"])
        assert sample["staleness"] == sample["version"] - oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One answer of an engine, as the engine wrote it down."""

    key: int
    start: int
    """Length of what the request began with."""
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Of each token, by the label that the engine had."""


def read_journals(job: Job) -> dict[tuple[int, int], list[Piece]]:
    """By (group, member), which the ids of requests name."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for place in range(len(job.engines)):
        for line in job.journal(place).read_bytes().splitlines():
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError:  # a kill cut the line short, so that its answer was never sent
                continue
            name = re.search(r"-g(\d+)\.\d+-m(\d+)", entry.rid)
            if name is not None and entry.spans:
                found.setdefault((int(name[1]), int(name[2])), []).append(_piece(entry))
    return found


def _piece(entry: Entry) -> Piece:
    answer = msgspec.json.decode(entry.answer)
    versions: list[int] = []
    for label, end in entry.spans:
        versions += [_version(label)] * (end - len(versions))
    return Piece(
        key=entry.key,
        start=entry.prompt_tokens,
        ids=answer["output_ids"],
        logprobs=[float(np.float32(item[0])) for item in answer["meta_info"]["output_token_logprobs"]],
        versions=versions,
    )


def _version(label: str) -> int:
    """Of `LINEAGE:VERSION`; engines start with "default", which is version 0."""
    return 0 if label == "default" else int(label.rpartition(":")[2])


def _is_made_of(sample: Trained, pieces: list[Piece]) -> bool:
    """Whether the response is these pieces' tokens, one piece after the other, each whole."""
    length, total = sample["prompt_length"], len(sample["tokens"])
    logprobs = [float(np.float32(value)) for value in sample["logprobs"]]
    versions: list[int] = []
    for version, end in sample["spans"]:
        versions += [version] * (end - len(versions))
    reached = {length}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        begin, end = piece.start - length, piece.start - length + len(piece.ids)
        if (
            piece.start in reached
            and sample["tokens"][piece.start : piece.start + len(piece.ids)] == piece.ids
            and logprobs[begin:end] == piece.logprobs
            and versions[begin:end] == piece.versions
        ):
            reached.add(piece.start + len(piece.ids))
    return total in reached and len(logprobs) == len(versions) == total - length


def _prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    row = Row(prompt=text, label=None, metadata={}, tools=None)
    return [int(token) for token in tokenizer.encode_prompt(row, chat_template=None)]


def read_events(folder: Path) -> list[Event]:
    """The log of all launches."""
    path = folder / FILE_NAME
    return list(read(path)) if path.exists() else []
