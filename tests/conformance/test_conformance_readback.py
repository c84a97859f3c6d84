"""Success says nothing of what an engine took; a few numbers that it is asked for do."""

import re
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fa_rollout.client import EnginePool
from fa_rollout.client.base.errors import ControlRefused
from tests.conformance.conformance_kit import Http, Target, assert_sampled_by
from tests.conformance.test_conformance_pieces import buckets_of, short
from trainer_hook.messages import Probe
from trainer_hook.model.index import ModelIndex
from trainer_hook.model.probes import Probes
from trainer_hook.model.score import score


def probes_of(model: Any, target: Target) -> list[Probe]:
    probes = Probes(ModelIndex.read(target.model))
    for bucket in buckets_of(model):
        probes.look(bucket)
    assert probes.chosen[0].before
    return probes.chosen


async def load(pool: EnginePool, path: Any, probes: list[Probe]) -> None:
    await pool.pause("retract")
    try:
        await pool.weights.load(str(path), "0:1", probes=probes)
    finally:
        await pool.continue_()


def test_names_that_an_engine_does_not_know_are_skipped_with_success_and_the_rest_stays(
    target: Target, model: Any, tmp_path: Any
) -> None:
    save_file({"base_model.model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")

    async def work(pool: EnginePool) -> None:
        await load(pool, tmp_path, [])
        assert_sampled_by(model, await short(pool))

    target.with_pool(work)


def test_an_engine_tells_the_numbers_that_it_was_given_also_in_a_pause(target: Target, other: Any) -> None:
    probes = probes_of(other, target)

    async def work(pool: EnginePool) -> None:
        await load(pool, target.other, probes)
        assert_sampled_by(other, await short(pool))

    async def read(http: Http) -> None:
        for probe in probes:
            ask = {"name": probe.name, "truncate_size": probe.num_rows}
            status, rows = await http.control("/get_weights_by_name", ask)
            assert status == 200
            row, values = rows if probe.num_rows > 1 else rows[0], probe.values["float32"]
            assert row[: len(values)] == values

    target.with_pool(work)
    target.with_http(read)


def test_an_engine_that_skipped_what_it_was_given_is_an_error(target: Target, other: Any) -> None:
    probes = probes_of(other, target)

    async def work(pool: EnginePool) -> None:
        text = re.escape(probes[0].name) + ".*the weights that it started with"
        with pytest.raises(ControlRefused, match=text):
            await load(pool, target.model, probes)

    target.with_pool(work)


def test_a_text_tells_an_engines_weights_from_others(target: Target, model: Any, other: Any) -> None:
    unreadable = [Probe(name="no.such.weight", num_rows=1, values={"float32": [1.0]})]

    async def work(pool: EnginePool) -> None:
        await pool.pause("retract")
        await pool.weights.load(str(target.other), "0:1", probes=unreadable)
        await pool.weights.check_score(score(other))
        with pytest.raises(ControlRefused, match="differ from the trainer's"):
            await pool.weights.check_score(score(model))

    target.with_pool(work)
