"""What a finished job must have trained, from its checkpoint and what its ranks wrote down.

Invariant checked: every group that was ever taken is trained once or named by the log as failed or dropped;
tokens, log-probabilities, versions and rewards of each sample are those of its own prompt; no sample is
staler than the bound.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_rollout.data.order import epoch_order
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.engines.scripted import EOS_ID, expected_ids, expected_logprobs, sequence_key
from tests.chaos.job import (
    GROUPS_PER_STEP,
    NUM_PROMPTS,
    SAMPLES_PER_GROUP,
    STALENESS,
    VOCAB_SIZE,
    Job,
)
from tests.chaos.trainer import NUM_RANKS
from tests.chaos.user_code import reward_of

Trained = dict[str, Any]
FloatArray = npt.NDArray[np.float32]


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


def check_conservation(job: Job, samples: Iterable[Trained], settled: dict[int, str]) -> None:
    """`settled`: groups that the log names as ended untrained, and how."""
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
    unnamed = ended - settled.keys()
    assert not unnamed, f"neither trained, nor unfinished, nor named by the log: {unnamed}"
    assert ends["trained"] == len(groups)


def check_epochs(job: Job, samples: Iterable[Trained]) -> None:
    """Each row comes once an epoch, in the order of the seed."""
    for sample in samples:
        epoch, place = divmod(sample["group"], NUM_PROMPTS)
        order = epoch_order(NUM_PROMPTS, epoch, seed=job.seed, shuffle=True)
        assert (sample["epoch"], sample["row"]) == (epoch, int(order[place])), sample["group"]
        assert sample["label"] == str(sample["row"])


def check_truth(job: Job, samples: Iterable[Trained]) -> None:
    """Tokens, log-probabilities and rewards are those of the sample's own prompt and versions."""
    tokenizer = Tokenizer.load(job.folder / "model")
    lineages = _lineages(job)
    prompts = [_prompt_ids(tokenizer, text) for text in job.prompts]
    for sample in samples:
        prompt = prompts[sample["row"]]
        tokens, length = sample["tokens"], sample["prompt_length"]
        assert tokens[:length] == prompt, f"the prompt of group {sample['group']}"
        key = sequence_key(np.asarray(prompt, np.int32))
        expected = expected_ids(key, length, len(tokens), VOCAB_SIZE).tolist()
        if sample["finish"] == "stop":
            expected[-1] = EOS_ID
        assert tokens[length:] == expected, f"the tokens of group {sample['group']}"
        assert sample["reward"] == np.float32(reward_of(expected)), f"the reward of group {sample['group']}"
        _check_logprobs(sample, key, lineages)
        assert sample["staleness"] is not None, "every engine tells versions"
        assert sample["staleness"] <= STALENESS, f"group {sample['group']} is too stale"
        oldest = min(version for version, _ in sample["spans"])
        assert sample["staleness"] == sample["version"] - oldest


def _check_logprobs(sample: Trained, key: int, lineages: list[str]) -> None:
    start, length = 0, sample["prompt_length"]
    found = np.asarray(sample["logprobs"], np.float32)
    for version, end in sample["spans"]:
        wanted = [
            expected_logprobs(key, length + start, length + end, f"{lineage}:{version}")
            for lineage in lineages
        ]
        matches = _is_of_rising_branches(found[start:end], wanted)
        assert matches, f"log-probabilities of group {sample['group']} [{start}, {end}) at version {version}"
        start = end
    assert start == len(found), "spans cover the response"


def _is_of_rising_branches(found: FloatArray, wanted: list[FloatArray]) -> bool:
    """Whether each token is of some branch, and none of an older one than the token before it.

    What a checkpoint kept of a sample goes on in the next branch, whose weights of that version are the same.
    """
    branch = 0
    for place, value in enumerate(found):
        while branch < len(wanted) and wanted[branch][place] != value:
            branch += 1
        if branch == len(wanted):
            return False
    return True


def _prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    row = Row(prompt=text, label=None, metadata={}, tools=None)
    return [int(token) for token in tokenizer.encode_prompt(row, chat_template=None)]


def _lineages(job: Job) -> list[str]:
    """All branches that any launch has had."""
    lines = read_events(job.folder)
    return list({event["lineage"]: None for event in lines if "lineage" in event})


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The log of all launches; a line that a kill cut short is left out."""
    events = []
    path = folder / "events.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
