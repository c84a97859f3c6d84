"""An abort ends what is meant, wherever it is, with the tokens that it has; nothing else is touched."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from embedded_client import Client, connect, output_logprobs

from tests.engines.reference import reference_logprobs
from tests.kit.embedded import EmbeddedEngine

LONG = {"max_new_tokens": 4000, "ignore_eos": True}
PROMPT = [1, 4, 5]


@pytest.fixture(scope="module")
def narrow_engine(model_folder: Path) -> Iterator[EmbeddedEngine]:
    """Two requests run at once, forty wait."""
    options = ["--max-running-requests", "2", "--max-queued-requests", "40"]
    with EmbeddedEngine.start(model_folder, options=options) as engine:
        yield engine


async def until_running(client: Client, num_running: int, num_waiting: int) -> None:
    async with asyncio.timeout(20):
        while True:
            statistics = await client.statistics()
            if (statistics["num_running"], statistics["num_waiting"]) == (num_running, num_waiting):
                return
            await asyncio.sleep(0.005)


def start(group: asyncio.TaskGroup, client: Client, rid: str, **body: Any) -> asyncio.Task[Any]:
    return group.create_task(
        client.generate(rid=rid, input_ids=PROMPT, return_logprob=True, sampling_params=LONG, **body)
    )


def test_a_running_request_answers_with_its_tokens_and_a_waiting_one_with_less(
    narrow_engine: EmbeddedEngine, reference: Any
) -> None:
    async def scene() -> None:
        async with connect(narrow_engine.url) as client, asyncio.TaskGroup() as group:
            tasks = {}
            for rid in ("a", "b", "waits"):
                tasks[rid] = start(group, client, rid)
                await until_running(client, *((1, 0) if rid == "a" else (2, 0) if rid == "b" else (2, 1)))
            await client.post("/abort_request", rid="waits")
            waited = await tasks["waits"]
            assert waited["output_ids"] == []
            assert waited["meta_info"]["finish_reason"] == {
                "type": "abort",
                "message": "Abort in waiting queue",
            }
            assert "prompt_tokens" not in waited["meta_info"]
            assert waited["meta_info"]["weight_versions"] == []
            assert waited["meta_info"]["weight_version"] == "default"
            await client.post("/abort_request", rid="b")
            ran = await tasks["b"]
            assert ran["meta_info"]["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert 0 < len(ran["output_ids"]) < 4000
            expected = reference_logprobs(reference, PROMPT, ran["output_ids"])
            assert output_logprobs(ran) == pytest.approx(expected, abs=1e-4)
            assert not tasks["a"].done()
            await client.post("/abort_request", abort_all=True)
            assert (await tasks["a"])["meta_info"]["finish_reason"]["type"] == "abort"

    asyncio.run(scene())


def test_a_live_rid_also_means_those_that_it_begins_and_an_unknown_one_nothing(
    narrow_engine: EmbeddedEngine,
) -> None:
    async def scene() -> None:
        async with connect(narrow_engine.url) as client, asyncio.TaskGroup() as group:
            tasks = {rid: start(group, client, rid) for rid in ("r1", "r10", "r2")}
            await until_running(client, 2, 1)
            for rid in ("r", "", "unknown"):
                await client.post("/abort_request", rid=rid)
            assert (await client.statistics())["num_running"] == 2
            await client.post("/abort_request", rid="r1")
            for rid in ("r1", "r10"):
                assert (await tasks[rid])["meta_info"]["finish_reason"]["type"] == "abort"
            assert not tasks["r2"].done()
            await client.post("/abort_request", abort_all=True)

    asyncio.run(scene())


def test_a_full_queue_is_told_at_once(narrow_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        async with connect(narrow_engine.url) as client, asyncio.TaskGroup() as group:
            for index in range(42):
                start(group, client, f"q{index}")
            await until_running(client, 2, 40)
            status, reply = await client.call("/generate", {"input_ids": PROMPT})
            assert (status, reply["message"]) == (503, "The request queue is full.")
            await client.post("/abort_request", abort_all=True)

    asyncio.run(scene())


def test_an_abort_while_paused_takes_effect_at_once_also_at_the_door(narrow_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        async with connect(narrow_engine.url) as client, asyncio.TaskGroup() as group:
            before = start(group, client, "before")
            await until_running(client, 1, 0)
            await client.post("/pause_generation", mode="in_place")
            during = start(group, client, "during")
            await until_running(client, 1, 1)
            for rid, task in (("before", before), ("during", during)):
                await client.post("/abort_request", rid=rid)
                assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
            assert before.result()["output_ids"]
            await client.post("/continue_generation")

    asyncio.run(scene())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(narrow_engine: EmbeddedEngine, is_stream: bool) -> None:
    async def scene() -> None:
        body = {"input_ids": PROMPT, "rid": "left", "sampling_params": LONG, "stream": is_stream}
        async with connect(narrow_engine.url) as client:

            async def read() -> None:
                async with client.session.post(narrow_engine.url + "/generate", json=body) as response:
                    await response.read()

            task = asyncio.create_task(read())
            await until_running(client, 1, 0)
            task.cancel()
            await asyncio.wait([task])
            await until_running(client, 0, 0)
            reply = await client.generate(rid="left", input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
            assert len(reply["output_ids"]) == 1

    asyncio.run(scene())


def test_many_requests_leave_nothing_behind(narrow_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        process = psutil.Process(narrow_engine.pid)
        params = {"max_new_tokens": 4, "ignore_eos": True}
        sizes = []
        async with connect(narrow_engine.url) as client:
            for _ in range(4):
                for _ in range(5):
                    calls = (client.generate(input_ids=PROMPT, sampling_params=params) for _ in range(40))
                    await asyncio.gather(*calls)
                sizes.append(process.memory_info().rss)
            assert (await client.statistics())["num_used_tokens"] == 0
        assert sizes[-1] - sizes[1] < 8 << 20

    asyncio.run(scene())
