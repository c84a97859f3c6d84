"""Faults, drops, aborts, updates and kills all at once: every group ends once, every record is true."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.generator.hub_end import LINEAGE, HubEnd, run_tree, write_prompts
from tests.generator.truth import assert_is_the_engines
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]

NUM_GROUPS = 60
FAULTS = [
    Rule(every=23, skip=5, status=500, body="trouble"),
    Rule(every=31, skip=8, drop="before"),
    Rule(every=37, skip=9, drop="middle"),
    Rule(every=7, skip=6, abort_after=0),
    Rule(every=5, skip=7, abort_after=3),
    Rule(every=41, skip=10, corrupt="null"),
    Rule(every=3, delay_s=0.05),
]


class Storm:
    """The hub in a storm: it gives groups out, loses them, drops them, updates, and keeps the books."""

    def __init__(self, hub: HubEnd, seed: int) -> None:
        self.hub = hub
        self.draw = random.Random(seed)
        self.issued: set[tuple[int, int]] = set()
        self.lost: set[tuple[int, int]] = set()
        self.attempt = dict.fromkeys(range(NUM_GROUPS), 0)
        self.next_version = 1
        self.num_freed = 0

    def answered(self) -> set[tuple[int, int]]:
        keys = [(a.group, a.attempt) for kind in (m.Commit, m.Settled) for a in self.hub.all(kind)]
        assert len(keys) == len(set(keys)), "a group was answered twice"
        return set(keys)

    def issue(self, groups: list[int]) -> None:
        for group in groups:
            self.issued.add((group, self.attempt[group]))
            self.hub.issue(group, attempt=self.attempt[group])

    def open_groups(self) -> list[int]:
        done = self.answered() | self.lost
        return [group for group, attempt in sorted(self.issued) if (group, attempt) not in done]

    def gust(self) -> None:
        """One thing that happens."""
        some = self.draw.sample(range(NUM_GROUPS), 3)
        match self.draw.randrange(6):
            case 0:
                self.hub.send(m.Drop(groups=some, reason="storm"))
            case 1:
                self.hub.send(m.AbortRunning(groups=self.draw.choice([None, some])))
            case 2 if len(self.hub.all(m.WeightsPublished)) == self.next_version - 1:
                path = self.draw.choice(["/weights", None])
                self.hub.send(m.PublishWeights(version=self.next_version, lineage=LINEAGE, path=path))
                self.next_version += 1
            case _:
                self.free()

    def free(self) -> None:
        commits = self.hub.all(m.Commit)
        for commit in commits[self.num_freed :]:
            assert_is_the_engines(self.hub.read(commit))
            self.hub.free(commit)
        self.num_freed = len(commits)

    def kill(self) -> None:
        """The generator dies; what it held is given out again, after what it had sent was read."""
        self.hub.version = len(self.hub.all(m.WeightsPublished))
        self.hub.restart()
        self.hub.version = len(self.hub.all(m.WeightsPublished))
        open_groups = self.open_groups()
        for group in open_groups:
            self.lost.add((group, self.attempt[group]))
            self.attempt[group] += 1
        self.issue(open_groups)


@pytest.mark.parametrize("partial", ["resume", "restart"])
def test_in_a_storm_every_group_ends_exactly_once_and_every_record_is_true(
    tmp_path: Path, play: Play, partial: str
) -> None:
    engine = play(tokens_per_s=200.0, lengths=Lengths(kind="uniform", low=5, high=60))
    write_prompts(tmp_path / "prompts.jsonl", NUM_GROUPS)
    tree = run_tree(tmp_path, engine.url, rollout={"partial": partial}, engine={"max_concurrent_samples": 16})
    with HubEnd(tree, ring_bytes=48 << 10) as hub:
        hub.wait_for(m.GeneratorReady)
        play(tokens_per_s=200.0, lengths=Lengths(kind="uniform", low=5, high=60), rules=FAULTS)
        storm = Storm(hub, seed=len(partial))
        storm.issue(list(range(NUM_GROUPS)))
        for round_number in range(60):
            hub.listen(0.02)
            storm.gust()
            if round_number == 30:
                storm.kill()

        def settled() -> bool:
            storm.free()
            return not storm.open_groups()

        hub.until(settled, timeout_s=60)
        assert storm.answered() | storm.lost == storm.issued
        assert len(hub.all(m.Commit)) > NUM_GROUPS // 4
        hub.until(lambda: engine.state()["num_running"] == 0)
