"""Stages of a stream in the middle of work: exact versions, and no engine in pieces is taken for whole."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.client.engine.labels import IN_PIECES
from tests.generator.hub_end import LINEAGE, HubEnd, run_tree
from tests.generator.test_updates import true_spans, under_way
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]
SLOWLY: dict[str, Any] = {"tokens_per_s": 40.0, "lengths": Lengths(tokens=1000)}
TENSORS = "/update_weights_from_tensor"


@pytest.fixture
def bucket(tmp_path: Path) -> m.TakeTensors:
    (tmp_path / "bucket").write_bytes(b"tensors")
    return m.TakeTensors(path=str(tmp_path / "bucket"))


class Trainer:
    """Orders stages."""

    def __init__(self, hub: HubEnd) -> None:
        self._hub = hub
        self._number = 0

    def begin(self, stage: m.Stage, *, version: int = 1) -> int:
        self._number += 1
        order = m.EngineStage(
            number=self._number, stage=stage, version=version, lineage=LINEAGE, lease_s=30.0
        )
        self._hub.send(order)
        return self._number

    def end(self, number: int) -> m.StageDone | m.StageFailed:
        def found() -> list[m.StageDone | m.StageFailed]:
            said = [*self._hub.all(m.StageDone), *self._hub.all(m.StageFailed)]
            return [message for message in said if message.number == number]

        self._hub.until(found)
        return found()[0]

    def take(self, stage: m.Stage, *, version: int = 1) -> m.Audience | None:
        done = self.end(self.begin(stage, version=version))
        assert isinstance(done, m.StageDone), done
        return done.audience

    def publish(self, bucket: m.TakeTensors, version: int) -> None:
        self.take(m.OpenStream(via=m.Via.TENSOR), version=version)
        self.take(bucket, version=version)
        self.take(m.SealStream(), version=version)
        self._hub.send(m.PublishWeights(version=version, lineage=LINEAGE, path=None, is_streamed=True))
        self._hub.until(lambda: version in [p.version for p in self._hub.all(m.WeightsPublished)])


def test_answers_stand_still_for_a_stream_and_their_spans_tell_it(
    tmp_path: Path, play: Play, bucket: m.TakeTensors
) -> None:
    engine = play(**SLOWLY)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, engine, 0)
        trainer = Trainer(hub)
        audience = trainer.take(m.OpenStream(via=m.Via.TENSOR))
        assert audience == m.Audience(urls=[engine.url], num_workers=1)
        assert engine.state()["pause_mode"] == "retract"
        trainer.take(bucket)
        (taken,) = engine.requests(TENSORS)
        assert [base64.b64decode(entry) for entry in taken.body["serialized_named_tensors"]] == [b"tensors"]
        trainer.publish(bucket, 1)
        hub.issue(1)
        answers = hub.answers(2)
        for spans in true_spans(hub, answers[0]):
            assert [version for version, _ in spans] == [0, 1]
        assert [spans[0][0] for spans in true_spans(hub, answers[1])] == [1, 1]


def test_a_trainer_that_leaves_ends_a_stage_and_the_engine_waits_for_the_next_stream(
    tmp_path: Path, play: Play, bucket: m.TakeTensors
) -> None:
    engine = play(**SLOWLY, rules=[Rule(path=TENSORS, delay_s=600.0, times=1)])
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        trainer = Trainer(hub)
        trainer.take(m.OpenStream(via=m.Via.TENSOR))
        number = trainer.begin(bucket)
        hub.until(lambda: engine.requests(TENSORS))
        hub.send(m.ContinueEngines())
        failed = trainer.end(number)
        assert isinstance(failed, m.StageFailed)
        assert "left the update" in failed.text
        hub.issue(0)
        hub.listen(1.0)
        assert not [r for r in engine.requests("/generate") if "probe" not in (r.rid or "")]
        trainer.publish(bucket, 2)
        assert [spans[0][0] for spans in true_spans(hub, hub.answers(1)[0])] == [2, 2]


def test_a_life_that_is_killed_in_a_stream_is_followed_by_one_that_does_not_trust_the_engine(
    tmp_path: Path, play: Play, bucket: m.TakeTensors
) -> None:
    engine = play(**SLOWLY)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        trainer = Trainer(hub)
        trainer.take(m.OpenStream(via=m.Via.TENSOR))
        trainer.take(bucket)
        hub.restart()
        hub.wait_for(m.GeneratorReady, 2)
        engine.clear()
        hub.issue(0)
        hub.listen(1.0)
        assert not engine.requests("/generate")
        labels = [r.body["new_version"] for r in engine.requests("/update_weight_version")]
        assert set(labels) <= {IN_PIECES}
        trainer.publish(bucket, 1)
        assert [spans[0][0] for spans in true_spans(hub, hub.answers(1)[0])] == [1, 1]


def test_a_life_that_is_killed_after_a_stream_was_sealed_is_followed_by_one_that_publishes_it(
    tmp_path: Path, play: Play, bucket: m.TakeTensors
) -> None:
    engine = play(**SLOWLY)
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        trainer = Trainer(hub)
        for stage in (m.OpenStream(via=m.Via.TENSOR), bucket, m.SealStream()):
            trainer.take(stage)
        hub.in_stream = True
        hub.restart()
        hub.wait_for(m.GeneratorReady, 2)
        hub.send(m.PublishWeights(version=1, lineage=LINEAGE, path=None, is_streamed=True))
        hub.wait_for(m.WeightsPublished)
        hub.issue(0)
        assert [spans[0][0] for spans in true_spans(hub, hub.answers(1)[0])] == [1, 1]
