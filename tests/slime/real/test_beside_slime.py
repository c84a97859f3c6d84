"""Where slime's own fully-async rollout fails, and what `fa_rollout.entry` does in the same place.

Each test plays one scene twice, with slime's function and with ours: same engines, arguments and order of
calls. The first half fails on the day that slime mends the matter, and the claim in docs/slime.md with it.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripted import Lengths, Script, ScriptedEngine
from tests.slime.real.checkout import HERE, PYTHON, environment, needs_checkout, options

pytestmark = needs_checkout

SLIMES = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
OURS = "fa_rollout.entry"
PLUGINS = "tests.slime.real.plugins"
BATCH, NUM_SAMPLES = 2, 2
SLOW: dict[str, Any] = {"lengths": Lengths(tokens=60), "tokens_per_s": 150.0}

Engines = Callable[..., list[ScriptedEngine]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One life of a rollout manager."""

    calls: list[dict[str, Any]]
    output: str

    @property
    def batches(self) -> list[list[Any]]:
        return [call["groups"] for call in self.calls if "groups" in call]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [sample for batch in self.batches for group in batch for sample in group]

    @property
    def trained(self) -> list[int]:
        return [group[0]["group"] for batch in self.batches for group in batch]

    @property
    def error(self) -> str:
        """Type and text of what ended the life; empty where nothing did."""
        last = self.calls[-1] if self.calls else {}
        return f"{last['error']}: {last['text']}" if "error" in last else ""


class Scene:
    """What both functions meet."""

    def __init__(self, folder: Path, model: Path, engines: Engines) -> None:
        self._folder, self._model, self._engines = folder, model, engines
        self.engine: ScriptedEngine | None = None

    def play(
        self,
        function: str,
        *more: str,
        script: dict[str, Any] | None = None,
        samples: int = NUM_SAMPLES,
        env: dict[str, str] | None = None,
        **plan: Any,
    ) -> Seen:
        """One life with this rollout function, against an engine of its own."""
        (self.engine,) = self._engines(1, **(script or {}))
        router = ScriptedEngine.start(Script(workers=[self.engine.url], router_drops=False))
        told = {"router": router.url, "engines": [self.engine.url], **plan}
        address = self.engine.url.removeprefix("http://")
        words = [PYTHON, str(HERE / "behaviour.py"), json.dumps(told), "--"]
        words += options(self._model, batch=BATCH, num_samples=samples)
        words += ["--rollout-external-engine-addrs", address, "--num-rollout", str(plan.get("stop", 6))]
        words += ["--rollout-function-path", function, *more]
        try:
            done = subprocess.run(
                words,
                env=environment(**(env or {})),
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=200,
            )
        finally:
            router.stop()
        lines = [line.removeprefix("CALL ") for line in done.stdout.splitlines() if line.startswith("CALL ")]
        output = done.stdout + done.stderr
        assert lines, output[-6000:]
        return Seen([json.loads(line) for line in lines], output)


@pytest.fixture
def scene(tmp_path: Path, model: Path, engines: Engines) -> Scene:
    return Scene(tmp_path, model, engines)


def test_a_fan_out_crashes_slimes_and_keeps_its_shape_here(scene: Scene) -> None:
    more = ["--custom-generate-function-path", f"{PLUGINS}.two_of_each"]
    assert "TypeError: int() argument" in scene.play(SLIMES, *more, stop=2).error
    ours = scene.play(OURS, *more, stop=2)
    assert not ours.error
    shapes = [[len(member) for member in group] for batch in ours.batches for group in batch]
    assert shapes == [[2] * NUM_SAMPLES] * 2 * BATCH


def test_an_evaluation_beside_rollouts_crashes_slimes_and_works_here(scene: Scene, model: Path) -> None:
    more = ["--eval-interval", "2", "--eval-prompt-data", "few", str(model / "few.jsonl")]
    more += ["--eval-input-key", "text", "--eval-label-key", "label", "--n-samples-per-eval-prompt", "1"]
    more += ["--sglang-server-concurrency", "2"]
    plan: dict[str, Any] = {"script": SLOW, "stop": 4, "evaluate_after": [1]}
    assert "doesn't support evaluation" in scene.play(SLIMES, *more, **plan).error
    own = ["--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"]
    assert "bound to a different event loop" in scene.play(SLIMES, *more, *own, **plan).error
    ours = scene.play(OURS, *more, **plan)
    assert not ours.error
    (rewards,) = [call["rewards"] for call in ours.calls if "rewards" in call]
    assert len(rewards["few"]) == 6
    assert len(ours.batches) == 4


def test_slimes_backlog_ages_without_a_bound_and_ours_within_it(scene: Scene) -> None:
    plan: dict[str, Any] = {"stop": 14, "train_s": 0.6, "script": {"lengths": Lengths(tokens=12)}}

    def oldest(seen: Seen) -> int:
        ages = [
            step + 1 - int(label)
            for step, batch in enumerate(seen.batches)
            for group in batch
            for sample in group
            for label in sample["versions"]
        ]
        return max(ages)

    bound = 2
    assert oldest(scene.play(SLIMES, **plan)) > bound + 2
    assert oldest(scene.play(OURS, env={"FA_ROLLOUT_STALENESS": str(bound)}, **plan)) <= bound


def test_slimes_fills_a_free_place_at_its_next_poll_and_ours_when_it_becomes_free(scene: Scene) -> None:
    more = ["--sglang-server-concurrency", "1"]
    plan: dict[str, Any] = {"samples": 1, "stop": 3, "updates": False}
    plan["script"] = {"lengths": Lengths(tokens=20), "tokens_per_s": 200.0}

    def median_gap_s(function: str) -> float:
        """From one request to the next, of which each lasts a tenth of a second."""
        scene.play(function, *more, **plan)
        assert scene.engine is not None
        times = [r.time_s for r in scene.engine.requests("/generate") if "probe" not in (r.rid or "")]
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[len(gaps) // 2]

    assert median_gap_s(SLIMES) > 0.9
    assert median_gap_s(OURS) < 0.6


def test_slimes_ignores_a_dynamic_filter_and_ours_applies_it(scene: Scene) -> None:
    filters = "slime.rollout.filter_hub.dynamic_sampling_filters"
    more = ["--dynamic-sampling-filter-path", f"{filters}.check_reward_nonzero_std"]
    more += ["--custom-rm-path", f"{PLUGINS}.reward_equal_in_odd_groups"]
    assert any(group % 2 for group in scene.play(SLIMES, *more).trained)
    ours = scene.play(OURS, *more)
    assert len(ours.trained) == 6 * BATCH
    assert not any(group % 2 for group in ours.trained)
    dropped = sum(call["metrics"].get("rollout/dynamic_filter/drop_zero_std_1.0", 0) for call in ours.calls)
    assert dropped > 0


def test_functions_over_a_whole_rollout_get_the_same_from_slimes_synchronous_one_and_from_ours(
    scene: Scene, tmp_path: Path
) -> None:
    more = ["--group-rm", "--over-sampling-batch-size", "4"]
    more += ["--rollout-sample-hook-path", f"{PLUGINS}.note_rollout_id"]
    more += ["--rollout-sample-filter-path", f"{PLUGINS}.remove_first"]
    more += ["--rollout-all-samples-process-path", f"{PLUGINS}.note_all"]

    def told(function: str) -> list[dict[str, Any]]:
        file = tmp_path / f"{function}.jsonl"
        seen = scene.play(function, *more, env={"FA_ROLLOUT_TEST_SEEN": str(file)}, stop=4)
        assert not seen.error, seen.error
        assert all(sample["reward"] is not None for sample in seen.samples)
        return [json.loads(line) for line in file.read_text().splitlines()]

    slimes, ours = told("slime.rollout.sglang_rollout.generate_rollout"), told(OURS)
    assert len(slimes) == len(ours) == 4
    for step, (theirs, own) in enumerate(zip(slimes, ours, strict=True)):
        assert theirs["num_removed"] == own["num_removed"] == 1
        assert theirs["takes_groups"] == own["takes_groups"]
        assert set(theirs["hooked_in"]) == {step}
        assert None not in own["hooked_in"]
        assert max(own["hooked_in"]) <= step
        assert own["groups"] == sorted(own["groups"])


def test_slimes_drops_a_group_that_raises_in_silence_and_ours_tells(scene: Scene, tmp_path: Path) -> None:
    raised = tmp_path / "raised"
    more = ["--custom-rm-path", f"{PLUGINS}.raises_in_group_2"]
    env = {"FA_ROLLOUT_TEST_RAISED": str(raised)}
    slimes = scene.play(SLIMES, *more, env=env)
    assert raised.exists()
    assert not slimes.error
    assert len(slimes.batches) == 6
    assert 2 not in slimes.trained, "its prompt was taken, and nobody will ever train it"
    ours = scene.play(OURS, *more, env=env)
    assert "GeneratorFailed" in ours.error
    assert "ArithmeticError: no reward for group 2" in ours.error
    assert "plugins.py" in ours.error
    delay_s = ours.calls[-1]["at_s"] - float(raised.read_text())
    print(f"told {delay_s:.2f} s after it was raised")
    assert delay_s < 10, "no wait for a timeout or a poll"


def test_slimes_mixes_versions_unasked_and_ours_does_as_the_flags_say(scene: Scene) -> None:
    plan: dict[str, Any] = {"script": SLOW, "train_s": 0.2}

    def mixed(seen: Seen) -> list[dict[str, Any]]:
        assert not seen.error
        return [sample for sample in seen.samples if len(set(sample["versions"])) > 1]

    unasked = mixed(scene.play(SLIMES, **plan))
    assert unasked
    assert all(sample["num_masked"] == 0 for sample in unasked)
    plan["script"] = {"lengths": Lengths(kind="list", values=[10, 60]), "tokens_per_s": 150.0}
    assert not mixed(scene.play(OURS, **plan)), "without --partial-rollout an aborted answer starts anew"
    plan["script"] = SLOW
    resumed = mixed(scene.play(OURS, "--partial-rollout", **plan))
    assert resumed
    assert all(sample["num_masked"] == 0 for sample in resumed)
    flags = ["--partial-rollout", "--mask-offpolicy-in-partial-rollout"]
    masked = mixed(scene.play(OURS, *flags, **plan))
    assert masked
    assert all(0 < sample["num_masked"] < sample["length"] for sample in masked)


def test_a_resume_loses_what_slimes_had_under_way_and_nothing_here(scene: Scene, tmp_path: Path) -> None:
    def trained(function: str) -> list[int]:
        save = tmp_path / function
        save.mkdir()
        more = ["--partial-rollout", "--save", str(save), "--save-interval", "1"]
        plan: dict[str, Any] = {"script": SLOW}
        first = scene.play(function, *more, stop=5, save_after=2, **plan)
        (save / "latest_checkpointed_iteration.txt").write_text("2")
        second = scene.play(function, *more, "--load", str(save), first=3, stop=8, **plan)
        return first.trained[: 3 * BATCH] + second.trained

    slimes, ours = trained(SLIMES), trained(OURS)
    assert len(slimes) == len(ours) == 8 * BATCH
    lost = set(range(max(slimes))) - set(slimes)
    assert lost, "the data source stands behind what was taken from it and never trained"
    assert sorted(ours) == list(range(8 * BATCH))
