"""Weight updates in the middle of work: exact versions, nothing lost, engines that always go on."""

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.config import ConfigError
from fa_rollout.generator.updates.engine_updates import pause_mode
from tests.client.client_kit import post
from tests.generator.hub_end import LINEAGE, VOCAB_SIZE, HubEnd, run_tree
from tests.generator.truth import Spans, assert_is_the_engines
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]

NUM_TOKENS = 32
SLOWLY: dict[str, Any] = {"tokens_per_s": 40.0, "lengths": Lengths(tokens=1000)}


UPDATE = ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]


def controls(engine: ScriptedEngine) -> list[str]:
    """Control calls in their order, without looks at the version."""
    paths = [r.path for r in engine.requests() if r.method == "POST" and r.path != "/generate"]
    return [path.removeprefix("/") for path in paths]


def true_spans(hub: HubEnd, answer: m.Commit | m.Settled) -> list[Spans]:
    """The version spans of a committed group's samples, all of whose tokens are the engine's."""
    assert isinstance(answer, m.Commit)
    assert answer.response_lens == [NUM_TOKENS] * 2
    return assert_is_the_engines(hub.read(answer))


def under_way(hub: HubEnd, engine: ScriptedEngine, *groups: int) -> None:
    """Give groups out, and wait until their samples have some tokens."""
    hub.wait_for(m.GeneratorReady)
    engine.clear()
    hub.issue(*groups)
    hub.until(lambda: len(engine.requests("/generate")) == 2 * len(groups))
    some_tokens_later_s = time.monotonic() + 0.25
    hub.until(lambda: time.monotonic() > some_tokens_later_s)


def test_an_update_in_the_middle_of_answers_splits_their_spans_and_aborts_nothing(
    tmp_path: Path, play: Play
) -> None:
    engine = play(**SLOWLY)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, engine, 0, 1)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        (published,) = hub.wait_for(m.WeightsPublished)
        assert published.version == 1
        assert published.bubble_s > 0
        hub.issue(2)
        answers = hub.answers(3)
        for group in (0, 1):
            for spans in true_spans(hub, answers[group]):
                assert [version for version, _ in spans] == [0, 1]
        assert true_spans(hub, answers[2]) == [[(1, NUM_TOKENS)]] * 2
        assert [(c.oldest_version, c.newest_version) for c in hub.all(m.Commit)] == [(0, 1), (0, 1), (1, 1)]
    assert hub.all(m.Dispatched)[-1] == m.Dispatched(groups=[2], version=1)
    assert controls(engine) == UPDATE
    pause, _, update, _ = (r for r in engine.requests() if r.method == "POST" and r.path != "/generate")
    assert pause.body["mode"] == "retract"
    assert update.body["model_path"] == "/weights/1"
    assert update.body["weight_version"] == f"{LINEAGE}:1"
    assert update.body["abort_all_requests"] is False


@pytest.mark.parametrize("partial", ["resume", "restart"])
def test_engines_without_spans_are_settled_by_aborts_of_our_own_requests(
    tmp_path: Path, partial: str
) -> None:
    with (
        ScriptedEngine.start(vocab_size=VOCAB_SIZE, protocol="0.5.15", **SLOWLY) as engine,
        HubEnd(run_tree(tmp_path, engine.url, rollout={"partial": partial})) as hub,
    ):
        under_way(hub, engine, 0, 1)
        assert not hub.all(m.GeneratorReady)[0].spans
        ours = {r.rid for r in engine.requests("/generate")}
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        hub.wait_for(m.WeightsPublished)
        assert {r.rid for r in engine.requests("/abort_request")} == ours
        assert not any(r.body.get("abort_all") for r in engine.requests("/abort_request"))
        assert [r.body["mode"] for r in engine.requests("/pause_generation")] == ["retract"]
        versions = {"resume": [0, 1], "restart": [1]}[partial]
        for commit in hub.answers(2).values():
            for spans in true_spans(hub, commit):
                assert [version for version, _ in spans] == versions


def test_weights_pushed_by_hand_get_their_label_while_the_engines_stand_still(
    tmp_path: Path, play: Play
) -> None:
    engine = play(**SLOWLY)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, engine, 0)
        hub.send(m.PauseEngines(lease_s=30))
        hub.wait_for(m.EnginesPaused)
        hub.issue(1)
        hub.listen(0.3)
        assert engine.state()["pause_mode"] == "retract"
        assert len(engine.requests("/generate")) == 2
        assert [g for said in hub.all(m.Dispatched) for g in said.groups] == [0]
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path=None))
        (published,) = hub.wait_for(m.WeightsPublished)
        assert published.bubble_s > 0.3
        answers = hub.answers(2)
        for spans in true_spans(hub, answers[0]):
            assert [version for version, _ in spans] == [0, 1]
        assert true_spans(hub, answers[1]) == [[(1, NUM_TOKENS)]] * 2
    assert controls(engine) == ["pause_generation", "update_weight_version", "continue_generation"]
    (labelled,) = engine.requests("/update_weight_version")
    assert labelled.body["abort_all_requests"] is False


def test_a_pause_whose_owner_does_not_come_back_ends_with_its_lease_and_costs_no_deadline(
    tmp_path: Path, play: Play
) -> None:
    engine = play(**SLOWLY)
    tree = run_tree(tmp_path, engine.url, rollout={"group_timeout_s": 1.5}, engine={"request_timeout_s": 1.5})
    with HubEnd(tree) as hub:
        under_way(hub, engine, 0)
        hub.send(m.PauseEngines(lease_s=1.6))
        hub.wait_for(m.Warned)
        assert "they go on" in hub.all(m.Warned)[0].text
        commit = hub.answers(1)[0]
        true_spans(hub, commit)
    assert controls(engine) == ["pause_generation", "continue_generation"]


def test_an_update_that_an_engine_refuses_is_told_and_the_old_version_goes_on(
    tmp_path: Path, play: Play
) -> None:
    refusal = Rule(path="/update_weights_from_disk", status=400, body='{"success":false,"message":"no file"}')
    engine = play(**SLOWLY, rules=[refusal])
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, engine, 0)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        (failed,) = hub.wait_for(m.UpdateFailed)
        assert "no file" in failed.text
        commit = hub.answers(1)[0]
        assert true_spans(hub, commit) == [[(0, NUM_TOKENS)]] * 2
        play(**SLOWLY)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        hub.wait_for(m.WeightsPublished)


def test_an_only_engine_that_is_lost_in_an_update_is_waited_for(tmp_path: Path, play: Play) -> None:
    lost = Rule(path="/update_weights_from_disk", drop="before", times=1)
    engine = play(**SLOWLY, rules=[lost])
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, engine, 0)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        (published,) = hub.wait_for(m.WeightsPublished)
        assert published.version == 1
        assert not hub.all(m.UpdateFailed)
        hub.answers(1)


def test_an_only_engine_that_stays_away_in_an_update_is_waited_for_as_long_as_a_batch_may_be(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine.start(vocab_size=VOCAB_SIZE)
    with engine, HubEnd(run_tree(tmp_path, engine.url, trainer={"stall_s": 1.0})) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.stop()
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        (failed,) = hub.wait_for(m.UpdateFailed)
        assert engine.url in failed.text


@pytest.mark.parametrize("protocol", ["0.5.23", "0.5.15"])
def test_answers_of_an_engine_that_was_started_anew_are_made_again_and_cost_no_attempt(
    tmp_path: Path, protocol: str
) -> None:
    engine = ScriptedEngine.start(vocab_size=VOCAB_SIZE, protocol=protocol, **SLOWLY)
    with engine, HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        hub.wait_for(m.WeightsPublished)
        tell(engine, "default")  # as its next life would
        engine.clear()
        hub.issue(0, 1)
        answers = hub.answers(2)
        assert all(true_spans(hub, answers[group]) == [[(1, NUM_TOKENS)]] * 2 for group in (0, 1))
        assert controls(engine) == ["pause_generation", "update_weights_from_disk", "continue_generation"]


def test_an_engine_with_a_version_that_was_never_published_waits_for_the_next(tmp_path: Path) -> None:
    engine = ScriptedEngine.start(vocab_size=VOCAB_SIZE)
    with engine, HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        tell(engine, f"{LINEAGE}:1")
        engine.clear()
        hub.restart()
        hub.wait_for(m.GeneratorReady, 2)
        hub.issue(0)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path="/weights/1"))
        hub.wait_for(m.WeightsPublished)
        assert true_spans(hub, hub.answers(1)[0]) == [[(1, NUM_TOKENS)]] * 2
        assert "update_weight_version" not in controls(engine)


def tell(engine: ScriptedEngine, label: str) -> None:
    """The engine tells this label from now on, by no doing of the run's."""
    body = json.dumps({"new_version": label, "abort_all_requests": False}).encode()
    request = urllib.request.Request(f"{engine.url}/update_weight_version", body, method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def test_a_new_lineage_is_current_and_what_was_sampled_before_is_unknown(tmp_path: Path, play: Play) -> None:
    engine = play(**SLOWLY)
    post(engine, "/update_weight_version", {"new_version": f"{LINEAGE}:9"})
    with HubEnd(run_tree(tmp_path, engine.url), version=9) as hub:
        under_way(hub, engine, 0)
        hub.send(m.PublishWeights(version=2, lineage="efgh", path="/weights/2"))
        hub.wait_for(m.WeightsPublished)
        hub.issue(1)
        answers = hub.answers(2)
        versions = {g: [v for v, _ in hub.read(a).spans(0)] for g, a in answers.items()}
        assert versions == {0: [-1, 2], 1: [2]}


def test_engines_are_brought_to_the_runs_version_before_the_first_request(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url), version=3, weights="/weights/3") as hub:
        hub.wait_for(m.GeneratorReady)
        assert controls(engine) == UPDATE
        (update,) = engine.requests("/update_weights_from_disk")
        assert (update.body["model_path"], update.body["weight_version"]) == ("/weights/3", f"{LINEAGE}:3")
        hub.issue(0)
        assert hub.read(hub.answers(1)[0]).spans(0) == [(3, 12)]
        # The next life finds the engines as they should be, and leaves them alone.
        engine.clear()
        hub.restart()
        hub.wait_for(m.GeneratorReady, 2)
        assert controls(engine) == ["continue_generation"]
        hub.issue(1)
        assert hub.read(hub.answers(2)[1]).spans(0) == [(3, 12)]


def test_a_life_that_is_killed_while_engines_are_paused_is_followed_by_one_that_continues_them(
    tmp_path: Path, play: Play
) -> None:
    engine = play(**SLOWLY)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, engine, 0)
        hub.send(m.PauseEngines(lease_s=30))
        hub.wait_for(m.EnginesPaused)
        hub.restart()
        hub.wait_for(m.GeneratorReady, 2)
        assert engine.state()["pause_mode"] is None
        hub.issue(0, attempt=1)
        assert isinstance(hub.answers(1)[0], m.Commit)


@pytest.mark.parametrize(
    ("configured", "has_spans", "mode"),
    [
        ("auto", True, "retract"),
        ("auto", False, "abort"),
        ("abort", True, "abort"),
        ("abort", False, "abort"),
        ("retract", True, "retract"),
        ("in_place", True, "in_place"),
    ],
)
def test_engines_are_paused_so_that_every_token_has_a_version(
    configured: str, has_spans: bool, mode: str
) -> None:
    assert pause_mode(configured, has_spans=has_spans) == mode


@pytest.mark.parametrize("configured", ["retract", "in_place"])
def test_a_pause_that_would_mix_versions_without_a_trace_is_refused(configured: str) -> None:
    with pytest.raises(ConfigError, match=r"mixes weight versions in one answer"):
        pause_mode(configured, has_spans=False)
