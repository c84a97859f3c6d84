"""A step's groups cut into each rank's part. Pure.

Invariant: every sample of the step is trained by exactly one data-parallel rank, and all ranks get as many
micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fa_rollout.hub.flow.composition import staleness
from fa_rollout.hub.flow.flow import Step
from fa_rollout.hub.flow.replay import Recording
from trainer_hook.batches.balance import SampleSize, split
from trainer_hook.messages import Batch, Commit, Handout, Part


def mask_before(commit: Commit, member: int, oldest_allowed: int) -> int:
    """Response tokens from the start whose version is older than allowed (or unknown)."""
    return max((end for version, end, _ in commit.spans[member] if version < oldest_allowed), default=0)


def loss_tokens(commit: Commit, member: int, oldest_allowed: int | None) -> int:
    """Response tokens of a sample that are in the loss."""
    if oldest_allowed is None:
        return commit.loss_lens[member]
    cut = mask_before(commit, member, oldest_allowed)
    return sum(loss for _, end, loss in commit.spans[member] if end > cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How steps are cut."""

    dp_size: int
    max_tokens_per_micro_batch: int | None
    oldest_allowed: int | None
    """Version below which tokens leave the loss (the `mask` policy); None: none do."""
    recording: Recording | None = None
    """A run that says who gets what; None: the split is even in tokens."""


def cut(step: Step, terms: Terms) -> list[Batch]:
    """One `Batch` per data-parallel rank, `request` and `wait_s` left at 0.

    Raises:
        UnsplittableBatch: fewer samples than ranks, a sample longer than a micro-batch may be, or other ranks
            or samples than the recorded run had.
    """
    sizes = _sizes(step.commits, terms)
    if terms.recording is None:
        ranks = _split(sizes, terms)
    else:
        ranks = terms.recording.parts(step.step, terms.dp_size, {(s.record, s.member) for s in sizes})
    step.num_tokens = sum(size.loss_tokens for size in sizes)
    return [_batch(step, micro_batches, terms) for micro_batches in ranks]


def _sizes(commits: Sequence[Commit], terms: Terms) -> list[SampleSize]:
    return [
        SampleSize(
            record=index,
            member=member,
            num_tokens=prompt_len + response_len,
            loss_tokens=loss_tokens(commit, member, terms.oldest_allowed),
        )
        for index, commit in enumerate(commits)
        for member, (prompt_len, response_len) in enumerate(
            zip(commit.prompt_lens, commit.response_lens, strict=True)
        )
    ]


def _split(sizes: Sequence[SampleSize], terms: Terms) -> list[list[list[Part]]]:
    limit = terms.max_tokens_per_micro_batch
    return split(sizes, num_ranks=terms.dp_size, max_tokens_per_micro_batch=limit)


def assignment(step: Step, batch: Batch) -> list[list[tuple[int, int, bool, int]]]:
    """A rank's part for the log: by micro-batch, (group, member, filler, mask_before) of each sample."""
    groups = {g.commit.sequence: g.group for g in step.groups if g.commit is not None}
    names = [groups[handout.sequence] for handout in batch.records]
    return [
        [(names[part.record], part.member, part.filler, part.mask_before) for part in parts]
        for parts in batch.micro_batches
    ]


def _batch(step: Step, micro_batches: list[list[Part]], terms: Terms) -> Batch:
    commits = step.commits
    used = sorted({part.record for parts in micro_batches for part in parts})
    local = {index: number for number, index in enumerate(used)}
    return Batch(
        request=0,
        step=step.step,
        version=step.version,
        records=[_handout(commits[index]) for index in used],
        micro_batches=[
            [_local(part, local, commits, terms.oldest_allowed) for part in parts] for parts in micro_batches
        ],
        num_groups_global=len(step.groups),
        num_samples_global=step.num_samples,
        num_tokens_global=step.num_tokens,
        num_ranks_global=terms.dp_size,
        reward_mean=step.reward_mean,
        num_rewards_global=len(step.rewards),
        staleness_max=staleness(step.version, step.oldest_version),
        wait_s=0.0,
        last=step.last,
    )


def _handout(commit: Commit) -> Handout:
    return Handout(
        incarnation=commit.incarnation,
        sequence=commit.sequence,
        position=commit.position,
        length=commit.length,
    )


def _local(part: Part, local: dict[int, int], commits: list[Commit], oldest_allowed: int | None) -> Part:
    masked = 0 if oldest_allowed is None else mask_before(commits[part.record], part.member, oldest_allowed)
    return Part(record=local[part.record], member=part.member, filler=part.filler, mask_before=masked)
