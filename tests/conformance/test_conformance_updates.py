"""New weights and their labels, in the middle of answers and between them."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa_rollout.client import Completion, ControlFailed, EnginePool
from tests.conformance.conformance_kit import (
    LONG,
    PROMPT,
    TOLERANCE,
    Http,
    Target,
    ask,
    assert_sampled_by,
    request,
    under_way,
)
from tests.engines.reference import reference_logprobs


async def load(pool: EnginePool, folder: Path, label: str, *, mode: str = "retract") -> None:
    await pool.pause(mode)
    await pool.weights.load(str(folder), label)
    await pool.continue_()


def test_an_update_in_place_is_told_by_token_or_for_the_whole_answer(target: Target, model: Any) -> None:
    async def work(pool: EnginePool) -> Completion:
        (call,) = await under_way(pool, 1, max_new_tokens=1500)
        await load(pool, target.other, "0:1", mode="in_place")
        assert await pool.weights.versions() == {target.engine_url: "0:1"}
        return await call

    completion = target.with_pool(work)
    assert (completion.finish, completion.has_spans) == ("length", target.has_spans)
    expected = np.array(reference_logprobs(model, PROMPT, completion.output_ids.tolist()))
    differs = np.abs(completion.logprobs - expected) > TOLERANCE
    if target.has_spans:
        (label, end), last = completion.versions
        assert (label, last) == ("default", ("0:1", 1500))
        assert not differs[:end].any()
        assert differs[end:].mean() > 0.9
    else:  # two versions made it, and the label is that of the end: has_spans says so
        assert completion.versions == (("0:1", 1500),)
        assert not differs[:10].any()
        assert differs.any()


def test_a_retracted_answer_goes_on_under_the_new_weights_or_the_update_is_refused_before_any_harm(
    target: Target, model: Any, other: Any
) -> None:
    async def work(pool: EnginePool) -> Completion:
        (call,) = await under_way(pool, 1, max_new_tokens=1500)
        if target.has_spans:
            await load(pool, target.other, "0:1")
        else:  # SGLang 0.5.15 would die of an update that empties the cache
            with pytest.raises(ControlFailed, match="must empty its prefix cache"):
                await load(pool, target.other, "0:1")
            assert await pool.weights.versions() == {target.engine_url: "default"}
            await pool.continue_()
        return await call

    completion = target.with_pool(work)
    assert len(completion.output_ids) == 1500
    end = 1500
    if target.has_spans:
        (label, end), last = completion.versions
        assert (label, last) == ("default", ("0:1", 1500))
        assert_sampled_by(other, completion, start=end)
    assert_sampled_by(model, completion, end=end)


def test_an_answer_that_is_aborted_for_an_update_and_resumed_has_each_versions_log_probs(
    target: Target, model: Any, other: Any
) -> None:
    async def work(pool: EnginePool) -> tuple[Completion, Completion]:
        (call,) = await under_way(pool, 1)
        await pool.abort(["r0"])
        first = await call
        await load(pool, target.other, "0:1")
        prompt = [*PROMPT, *first.output_ids.tolist()]
        return first, await ask(pool, "rest", prompt, max_new_tokens=50, ignore_eos=True)

    first, rest = target.with_pool(work)
    assert first.versions == (("default", len(first.output_ids)),)
    assert rest.versions == (("0:1", 50),)
    assert_sampled_by(model, first)
    # The prompt was computed anew: had its old cache been used, these would not hold.
    prompt = [*PROMPT, *first.output_ids.tolist()]
    expected = reference_logprobs(other, prompt, rest.output_ids.tolist())
    np.testing.assert_allclose(rest.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_updates_to_and_fro_change_all_that_comes_after_them(target: Target, model: Any, other: Any) -> None:
    async def work(pool: EnginePool) -> list[Completion]:
        completions = []
        for number, folder in enumerate((target.other, target.model, target.other), start=1):
            await load(pool, folder, f"0:{number}")
            completions.append(await ask(pool, max_new_tokens=20, ignore_eos=True))
        return completions

    for number, completion in enumerate(target.with_pool(work), start=1):
        assert completion.versions == ((f"0:{number}", 20),)
        assert_sampled_by(other if number % 2 else model, completion)


def test_without_a_pause_an_update_waits_for_what_runs(target: Target, model: Any, other: Any) -> None:
    async def work(pool: EnginePool) -> tuple[Completion, Completion]:
        (call,) = await under_way(pool, 1, max_new_tokens=1500)
        await pool.weights.load(str(target.other), "0:1")
        return await call, await ask(pool, "late", max_new_tokens=20, ignore_eos=True)

    running, late = target.with_pool(work)
    assert (running.finish, len(running.output_ids)) == ("length", 1500)
    assert_sampled_by(model, running)
    assert late.versions == (("0:1", 20),)
    assert_sampled_by(other, late)


def test_a_label_is_set_without_ending_a_request_and_by_default_ends_all(target: Target) -> None:
    async def work(pool: EnginePool) -> Completion:
        (call,) = await under_way(pool, 1, max_new_tokens=1500)
        await pool.weights.set_label("0:7")
        assert await pool.weights.versions() == {target.engine_url: "0:7"}
        return await call

    completion = target.with_pool(work)
    assert (completion.finish, completion.versions[-1]) == ("length", ("0:7", 1500))

    async def by_default(http: Http) -> Any:
        call = asyncio.create_task(http.generate(request("r", **LONG)))
        await asyncio.sleep(0.7)
        status, answer = await http.control("/update_weight_version", {"new_version": "0:8"})
        assert (status, answer["new_version"]) == (200, "0:8")
        return (await call)[1]["meta_info"]["finish_reason"]["type"]

    assert target.with_http(by_default) == "abort"


def test_weights_that_cannot_be_loaded_are_an_error_and_the_old_ones_go_on(
    target: Target, model: Any, tmp_path: Path
) -> None:
    async def work(pool: EnginePool) -> Completion:
        await pool.pause("retract")
        with pytest.raises(ControlFailed, match="update_weights_from_disk"):
            await pool.weights.load(str(tmp_path / "nowhere"), "0:1")
        await pool.continue_()
        assert await pool.weights.versions() == {target.engine_url: "default"}
        return await ask(pool, max_new_tokens=20, ignore_eos=True)

    assert_sampled_by(model, target.with_pool(work))


def test_brackets_around_updates_are_known_to_newer_engines_alone(target: Target) -> None:
    status, _ = target.with_http(lambda http: http.control("/begin_weight_update", {}))
    assert status == (404 if target.kind == "sglang" else 200)


def test_a_cache_is_emptied_only_when_no_request_is_computed(target: Target) -> None:
    async def work(http: Http) -> list[int]:
        call = asyncio.create_task(http.generate(request("r", **LONG)))
        await asyncio.sleep(0.7)
        statuses = [(await http.control("/flush_cache", {}))[0]]
        for mode in ("in_place", "retract"):
            await http.control("/pause_generation", {"mode": mode})
            statuses.append((await http.control("/flush_cache", {}))[0])
            await http.control("/continue_generation", {})
            await asyncio.sleep(0.1)
        await http.control("/abort_request", {"rid": "r"})
        await call
        return statuses

    # Retracted requests stand in the queue; SGLang disregards it in a pause from 0.5.23 on.
    assert target.with_http(work) == [400, 400, 400 if target.kind == "sglang" else 200]
