"""Weights change between tokens, whole or not at all, and every token tells the version that sampled it."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from embedded_client import Client, connect, output_logprobs
from transformers import MixtralConfig, MixtralForCausalLM

from fa_rollout.engines.embedded.model.weights import ModelWeights
from tests.engines.reference import reference_logprobs
from tests.kit.embedded import EmbeddedEngine

LONG = {"max_new_tokens": 4000, "ignore_eos": True}
PROMPT = [1, 4, 5]
Scene = Callable[[Client], Awaitable[None]]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine.start(model_folder, weight_version="run:0") as engine:
        yield engine


def play(engine: EmbeddedEngine, model_folder: Path, scene: Scene) -> None:
    """Run a scene, then put weights, version and pause back."""

    async def whole() -> None:
        async with connect(engine.url) as client:
            try:
                await scene(client)
            finally:
                await client.post("/abort_request", abort_all=True)
                await client.post("/continue_generation")
                await update(client, model_folder, "run:0")

    asyncio.run(whole())


async def update(client: Client, folder: Path, version: str, **body: Any) -> Any:
    return await client.post(
        "/update_weights_from_disk", model_path=str(folder), weight_version=version, **body
    )


@asynccontextmanager
async def running(client: Client, **body: Any) -> AsyncIterator["asyncio.Task[Any]"]:
    """A request that has some tokens already and many to go; the task's result is its reply."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            client.generate(input_ids=PROMPT, return_logprob=True, sampling_params=LONG, **body)
        )
        await until_grown(client, 4)
        yield task


async def until(client: Client, **expected: int) -> None:
    async with asyncio.timeout(20):
        while not expected.items() <= (await client.statistics()).items():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_grown(client: Client, num_more: int) -> None:
    before = (await client.statistics())["num_generated_tokens"]
    async with asyncio.timeout(20):
        while (await client.statistics())["num_generated_tokens"] < before + num_more:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_a_retracted_request_goes_on_under_the_new_weights_with_a_new_cache(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path, reference: Any, other_reference: Any
) -> None:
    async def scene(client: Client) -> None:
        async with running(client, rid="long") as task:
            await client.post("/pause_generation", mode="retract")
            await until(client, num_running=0, num_waiting=1)
            assert (await client.call("/flush_cache", {}))[0] == 200
            reply = await update(client, other_folder, "run:1")
            assert reply == {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": 1,
            }
            await client.post("/continue_generation")
            await until_grown(client, 20)
            await client.post("/abort_request", rid="long")
            reply = await task
        ids, meta = reply["output_ids"], reply["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], first["start"]) == ("run:0", 0)
        assert second == {"version": "run:1", "start": first["end"], "end": len(ids)}
        assert (meta["weight_version"], meta["num_retractions"]) == ("run:1", 1)
        end = first["end"]
        assert 0 < end < len(ids)
        old = reference_logprobs(reference, PROMPT, ids)[:end]
        new = reference_logprobs(other_reference, PROMPT, ids)[end:]
        assert output_logprobs(reply) == pytest.approx(old + new, abs=1e-4)

    play(engine, model_folder, scene)


def test_a_request_paused_in_place_keeps_its_cache_and_tells_both_versions(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path, other_reference: Any
) -> None:
    async def scene(client: Client) -> None:
        async with running(client, rid="long") as task:
            await client.post("/pause_generation", mode="in_place")
            assert (await client.call("/flush_cache", {}))[0] == 400
            status, reply = await client.call(
                "/update_weights_from_disk", {"model_path": str(other_folder), "weight_version": "run:1"}
            )
            assert (status, reply["success"]) == (400, False)
            assert "flush_cache must be false" in reply["message"]
            _, info = await client.call("/model_info")
            assert info["weight_version"] == "run:0"
            await update(client, other_folder, "run:1", flush_cache=False)
            await client.post("/continue_generation")
            await until_grown(client, 20)
            await client.post("/abort_request", rid="long")
            reply = await task
        ids, meta = reply["output_ids"], reply["meta_info"]
        first, second = meta["weight_versions"]
        assert [first["version"], second["version"]] == ["run:0", "run:1"]
        assert (first["end"], second["end"]) == (second["start"], len(ids))
        assert meta["num_retractions"] == 0
        fresh = reference_logprobs(other_reference, PROMPT, ids)[first["end"] :]
        found = output_logprobs(reply)[first["end"] :]
        assert max(abs(a - b) for a, b in zip(found, fresh, strict=True)) > 1e-3

    play(engine, model_folder, scene)


def test_a_pause_by_abort_ends_all_and_holds_newcomers_until_continue(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path, other_reference: Any
) -> None:
    async def scene(client: Client) -> None:
        async with running(client) as task:
            reply = await client.post("/pause_generation")
            assert reply["status"] == "ok"
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        for path, status in (("/health", 200), ("/ping", 200), ("/ready", 503), ("/health_generate", 503)):
            assert (await client.call(path))[0] == status
        async with asyncio.TaskGroup() as group:
            held = group.create_task(
                client.generate(input_ids=PROMPT, return_logprob=True, sampling_params={"max_new_tokens": 5})
            )
            await until(client, num_waiting=1, num_running=0)
            await update(client, other_folder, "run:1")
            assert not held.done()
            await client.post("/continue_generation")
        reply = held.result()
        num = len(reply["output_ids"])
        assert reply["meta_info"]["weight_versions"] == [{"version": "run:1", "start": 0, "end": num}]
        expected = reference_logprobs(other_reference, PROMPT, reply["output_ids"])
        assert output_logprobs(reply) == pytest.approx(expected, abs=1e-4)

    play(engine, model_folder, scene)


def test_without_a_pause_an_update_waits_for_those_that_run_and_holds_the_others(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path
) -> None:
    async def scene(client: Client) -> None:
        async with running(client, rid="long") as task, asyncio.TaskGroup() as group:
            updating = group.create_task(update(client, other_folder, "run:1"))
            await asyncio.sleep(0.1)
            later = group.create_task(
                client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
            )
            await until(client, num_running=1, num_waiting=1)
            assert not updating.done()
            await client.post("/abort_request", rid="long")
            assert (await updating)["num_paused_requests"] == 0
            reply = await task
            assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["run:0"]
            spans = (await later)["meta_info"]["weight_versions"]
            assert [span["version"] for span in spans] == ["run:1"]

    play(engine, model_folder, scene)


def test_an_update_that_waits_is_applied_when_a_pause_comes(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path
) -> None:
    async def scene(client: Client) -> None:
        async with running(client, rid="long") as task, asyncio.TaskGroup() as group:
            updating = group.create_task(update(client, other_folder, "run:1"))
            await asyncio.sleep(0.1)
            await client.post("/pause_generation", mode="retract")
            assert (await updating)["num_paused_requests"] == 1
            await client.post("/abort_request", rid="long")
            await task

    play(engine, model_folder, scene)


def test_an_update_whose_client_hangs_up_before_its_turn_is_not_applied(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path
) -> None:
    async def scene(client: Client) -> None:
        async with running(client, rid="long") as task:
            updating = asyncio.create_task(update(client, other_folder, "run:1"))
            await asyncio.sleep(0.2)
            updating.cancel()
            await asyncio.wait([updating])
            await asyncio.sleep(0.1)
            await client.post("/abort_request", rid="long")
            await task
        reply = await client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
        assert reply["meta_info"]["weight_version"] == "run:0"
        assert (await client.statistics())["is_paused"] is False

    play(engine, model_folder, scene)


def test_an_update_may_abort_what_runs(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path
) -> None:
    async def scene(client: Client) -> None:
        async with running(client) as task:
            await update(client, other_folder, "run:1", abort_all_requests=True)
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"

    play(engine, model_folder, scene)


def broken_checkpoints(folder: Path, source: Path) -> dict[str, Path]:
    """Folders that must be refused, by the text that says why."""
    weights = safetensors.torch.load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    variants = {
        "unknown ones are more than all": weights | {"extra": torch.zeros(1 << 20)},
        f"{name} must have shape": weights | {name: torch.zeros(3, 3)},
    }
    folders = {}
    for index, (text, tensors) in enumerate(variants.items()):
        path = folder / str(index)
        path.mkdir()
        safetensors.torch.save_file(
            {key: value + 1 for key, value in tensors.items()}, path / "model.safetensors"
        )
        folders[text] = path
    cut = folder / "cut"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    folders["must be a whole safetensors file"] = cut
    folders["is none"] = folder / "absent"
    return folders


def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    async def scene(client: Client) -> None:
        body: dict[str, Any] = {
            "input_ids": PROMPT,
            "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        }
        before = await client.generate(**body)
        for text, folder in broken_checkpoints(tmp_path, other_folder).items():
            status, reply = await client.call(
                "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "run:9"}
            )
            assert (status, reply["success"]) == (400, False)
            assert text in reply["message"]
        after = await client.generate(**body)
        assert output_logprobs(after) == output_logprobs(before)
        assert after["meta_info"]["weight_version"] == "run:0"

    play(engine, model_folder, scene)


def test_checkpoints_in_several_files_and_in_half_precision_are_read_whole(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    weights = safetensors.torch.load_file(other_folder / "model.safetensors")
    names = sorted(weights)
    for part, some in enumerate((names[:7], names[7:])):
        halves = {name: weights[name].to(torch.bfloat16) for name in some}
        safetensors.torch.save_file(halves, tmp_path / f"model-0000{part}.safetensors")

    async def scene(client: Client) -> None:
        await update(client, tmp_path, "run:1")
        _, info = await client.call("/model_info")
        assert (info["model_path"], info["weight_version"]) == (str(tmp_path), "run:1")
        shutil.rmtree(tmp_path)
        await client.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})

    play(engine, model_folder, scene)


def test_the_version_can_be_renamed_with_and_without_aborting(
    engine: EmbeddedEngine, model_folder: Path
) -> None:
    async def scene(client: Client) -> None:
        async with running(client) as task:
            await client.post("/update_weight_version", new_version="run:4", abort_all_requests=False)
            await until_grown(client, 5)
            await client.post("/update_weight_version", new_version="run:5")
            reply = await task
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["run:0", "run:4"]
        _, info = await client.call("/model_info")
        assert info["weight_version"] == "run:5"

    play(engine, model_folder, scene)


def test_broken_weights_are_an_error_of_the_request_and_leave_no_trace(
    engine: EmbeddedEngine, model_folder: Path, tmp_path: Path, reference: Any
) -> None:
    weights = safetensors.torch.load_file(model_folder / "model.safetensors")
    broken = {name: torch.full_like(value, torch.nan) for name, value in weights.items()}
    safetensors.torch.save_file(broken, tmp_path / "model.safetensors")

    async def scene(client: Client) -> None:
        await update(client, tmp_path, "run:1")
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 5}}
        status, reply = await client.call("/generate", body)
        assert status == 500
        assert "not finite" in reply["error"]["message"]
        await update(client, model_folder, "run:2")
        reply = await client.generate(**body)
        expected = reference_logprobs(reference, PROMPT, reply["output_ids"])
        assert output_logprobs(reply) == pytest.approx(expected, abs=1e-4)

    play(engine, model_folder, scene)


def test_what_sglang_takes_without_a_word_is_taken_here_too(
    engine: EmbeddedEngine, model_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    old, new = (
        safetensors.torch.load_file(path / "model.safetensors") for path in (model_folder, other_folder)
    )
    name, short = "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"
    given = {"unknown": torch.zeros(3), name: new[name], short: new[short][:-2].clone()}
    safetensors.torch.save_file(given, tmp_path / "model.safetensors")

    async def held(client: Client, name: str) -> torch.Tensor:
        status, rows = await client.call("/get_weights_by_name", {"name": name, "truncate_size": 1 << 20})
        assert status == 200
        return torch.tensor(rows)

    async def scene(client: Client) -> None:
        await update(client, tmp_path, "run:1")
        assert torch.equal(await held(client, name), new[name])
        assert torch.equal(await held(client, short), torch.cat([new[short][:-2], old[short][-2:]]))
        untouched = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(await held(client, untouched), old[untouched])
        status, reply = await client.call("/get_weights_by_name", {"name": "unknown"})
        assert (status, reply["error"]["message"]) == (400, "Get parameter by name failed")

    play(engine, model_folder, scene)


def test_experts_are_taken_one_by_one_as_files_have_them() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = MixtralConfig(vocab_size=9, num_key_value_heads=1, num_local_experts=2, **sizes)
    model = MixtralForCausalLM(config)
    weights = ModelWeights(model)
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    weights.apply(weights.known({name: torch.full((8, 8), 7.0)}))
    fused = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    assert (fused[1, 8:] == 7).all()
    assert not (fused[0] == 7).any()
    assert not (fused[1, :8] == 7).any()
