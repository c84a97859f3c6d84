"""slime's own plug-in points, run unchanged: generate functions, rewards, hooks, filters."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.scripted import Lengths, ScriptedEngine
from tests.slime.kit import CODE, Manager, arguments, assert_true_to_engine, flat, train_async

Engines = Callable[..., tuple[list[ScriptedEngine], str]]


def test_a_custom_generate_function_posts_by_the_fast_client(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    changes = {"custom_generate_function_path": f"{CODE}.one_turn", "num_rollout": 2}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(2))
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert sample.metadata["by"] == "one_turn"
    assert sorted(manager.trained) == list(range(8))


def test_groups_of_a_client_of_its_own_are_waited_for_and_never_pass_the_bound(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines(lengths=Lengths(kind="list", values=[6, 6, 6, 60]), tokens_per_s=80.0)
    changes = {
        "custom_generate_function_path": f"{CODE}.by_a_client_of_its_own",
        "fa_rollout_log_dir": str(tmp_path / "log"),
        "fa_rollout_staleness": 3,
    }
    manager = Manager(arguments(tmp_path, router, num_rollout=12, **changes))
    train_async(manager, made, steps=range(12))
    assert max(manager.ages) <= 3
    logs = [log.read_text() for log in (tmp_path / "log").rglob("*.jsonl")]
    assert any('"commit' in log for log in logs)
    assert not any("oldest token of version" in log for log in logs), "no group was sampled in vain"


def test_a_prompt_that_a_custom_function_changes_is_the_one_that_is_sampled(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines()
    changes = {"custom_generate_function_path": f"{CODE}.with_a_preface", "num_rollout": 1}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(1))
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert len(sample.tokens) - sample.response_length == len(sample.prompt) == len("now ") + 27


def test_samples_that_a_custom_function_returns_aborted_are_sampled_on(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines(lengths=Lengths(tokens=60), tokens_per_s=100.0)
    changes = {"custom_generate_function_path": f"{CODE}.one_turn", "num_rollout": 4}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(4))
    assert any(len(sample.weight_versions) > 1 for sample in manager.samples)
    for sample in manager.samples:
        assert_true_to_engine(sample)
    assert sorted(manager.trained) == list(range(16))


def test_without_partial_rollout_an_aborted_sample_starts_anew(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(lengths=Lengths(kind="list", values=[10, 60]), tokens_per_s=100.0)
    manager = Manager(arguments(tmp_path, router, partial_rollout=False, num_rollout=4))
    train_async(manager, made, steps=range(4))
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert len(sample.weight_versions) == 1
    rids = [r for r in made[0].requests("/generate") if r.rid and "-m" in r.rid]
    assert len(rids) > len(manager.samples), "some were aborted by updates and sampled again"
    assert len({r.num_input_ids for r in rids}) == 1, "and always from the prompt"


def test_off_policy_tokens_are_masked_as_named(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(lengths=Lengths(tokens=60), tokens_per_s=100.0)
    changes = {"mask_offpolicy_in_partial_rollout": True, "num_rollout": 4}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(4))
    resumed = [sample for sample in manager.samples if len(sample.weight_versions) > 1]
    assert resumed
    for sample in manager.samples:
        assert_true_to_engine(sample)
        num_masked = sample.loss_mask.count(0)
        assert sample.loss_mask == [0] * num_masked + [1] * (sample.response_length - num_masked)
        assert (num_masked > 0) == (sample in resumed)


def test_group_rewards_get_the_whole_group(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    changes = {"group_rm": True, "custom_rm_path": f"{CODE}.rewards_of_a_group", "num_rollout": 1}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(1))
    assert {sample.reward for sample in manager.samples} == {2.0}


def test_rewards_may_use_sigalrm(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(
        arguments(tmp_path, router, custom_rm_path=f"{CODE}.reward_with_an_alarm", num_rollout=1)
    )
    train_async(manager, made, steps=range(1))
    assert {sample.reward for sample in manager.samples} == {7.0}


def test_hooks_know_the_rollout_id(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(tokens_per_s=60.0)
    manager = Manager(
        arguments(tmp_path, router, rollout_sample_hook_path=[f"{CODE}.note_rollout_id"], num_rollout=5)
    )
    train_async(manager, made, steps=range(5))
    for step, batch in manager.batches.items():
        hooked = {sample.metadata["hooked_in"] for group in batch for sample in group}
        assert max(hooked) <= step
    assert {s.metadata["hooked_in"] for s in manager.samples} > {0}


def test_a_filter_that_rejects_most_starves_nobody_and_loses_nothing(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines()
    changes = {
        "dynamic_sampling_filter_path": f"{CODE}.keep_one_in_five",
        "rollout_all_samples_process_path": f"{CODE}.count_all",
        "over_sampling_batch_size": 8,
        "num_rollout": 5,
    }
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(5))
    assert len(manager.trained) == len(set(manager.trained)) == 20
    assert all(group % 5 == 0 for group in manager.trained)
    dropped = sum(m.get("rollout/dynamic_filter/drop_not_a_fifth", 0) for m in manager.metrics.values())
    seen = manager.source.seen
    assert len(seen) == len(set(seen)) == 20 + dropped, "filtered groups come to who wants all samples, once"
    assert set(manager.trained) <= set(seen)


def test_the_sample_filter_sees_the_batch(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(
        arguments(tmp_path, router, rollout_sample_filter_path=f"{CODE}.remove_first", num_rollout=1)
    )
    train_async(manager, made, steps=range(1))
    assert [s.remove_sample for s in flat(manager.batches[0][0])] == [True, False]


def test_without_code_of_the_users_samples_are_the_same_lists(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(lengths=Lengths(tokens=60), tokens_per_s=100.0)
    manager = Manager(arguments(tmp_path, router, custom_rm_path=None, num_rollout=4))
    train_async(manager, made, steps=range(4))
    assert any(len(sample.weight_versions) > 1 for sample in manager.samples)
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert isinstance(sample.tokens, list)
        assert isinstance(sample.rollout_log_probs, list)
        assert sample.loss_mask == [1] * sample.response_length
        assert sample.reward == float(len(sample.response))


@pytest.mark.parametrize("path", [None, f"{CODE}.one_turn"])
def test_slimes_own_generate_gives_the_same(tmp_path: Path, engines: Engines, path: str | None) -> None:
    made, router = engines()
    args = arguments(
        tmp_path, router, fa_rollout_fast_client=False, custom_generate_function_path=path, num_rollout=1
    )
    manager = Manager(args)
    train_async(manager, made, steps=range(1))
    for sample in manager.samples:
        assert_true_to_engine(sample)
    assert sorted(manager.trained) == list(range(4))


def test_a_hashing_router_gets_the_session_of_each_sample(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router, router_policy="consistent_hashing", num_rollout=1))
    train_async(manager, made, steps=range(1))
    keys = {r.routing_key for r in made[0].requests("/generate") if r.rid and "-m" in r.rid}
    assert {sample.session_id for sample in manager.samples} == keys
    assert len(keys) == 8


def test_restarts_are_told_with_their_share(
    tmp_path: Path, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    made, router = engines(lengths=Lengths(kind="list", values=[8, 60]), tokens_per_s=60.0)
    manager = Manager(arguments(tmp_path, router, partial_rollout=False, num_rollout=8))
    train_async(manager, made, steps=range(8))
    told = [record.getMessage() for record in caplog.records if "thrown away" in record.getMessage()]
    assert told
    assert "--partial-rollout" in told[0]
    assert "%" in told[0]
