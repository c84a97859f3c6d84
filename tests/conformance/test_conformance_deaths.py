"""What ends a real SGLang server on a CPU, and the client never does; each case has a server of its own."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.conformance.conformance_kit import LONG, Http, Target, request
from tests.engines.reference import VOCAB_SIZE
from tests.kit.sglang_cpu.launch import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture
def doomed(model_folder: Path, other_folder: Path, tmp_path: Path) -> Iterator[tuple[SGLangServer, Target]]:
    with SGLangServer.start(model_folder, log=tmp_path / "server.log") as server:
        url = server.url
        yield (
            server,
            Target(kind="sglang", url=url, engine_url=url, model=model_folder, other=other_folder),
        )


def test_ids_outside_of_the_vocabulary_do(doomed: tuple[SGLangServer, Target]) -> None:
    server, target = doomed
    with pytest.raises(aiohttp.ClientError):
        target.with_http(lambda http: http.generate(request("r") | {"input_ids": [5, VOCAB_SIZE + 1000]}))
    assert server.process.wait(30) == 1


def test_an_update_that_empties_the_cache_under_retracted_requests_does(
    doomed: tuple[SGLangServer, Target],
) -> None:
    server, target = doomed

    async def work(http: Http) -> None:
        call = asyncio.create_task(http.generate(request("r", **LONG)))
        await asyncio.sleep(0.7)
        await http.control("/pause_generation", {"mode": "retract"})
        try:
            await http.control("/update_weights_from_disk", {"model_path": str(target.other)})
        finally:
            await asyncio.gather(call, return_exceptions=True)

    with pytest.raises(aiohttp.ClientError):
        target.with_http(work)
    assert server.process.wait(30) == 1


PIECES = {
    "a broken pickle of tensors": (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["AAAA"], "flush_cache": False},
    ),
    "a broadcast of a group that it is not in": (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none", "flush_cache": False},
    ),
}


@pytest.mark.parametrize("what", PIECES)
def test_pieces_of_weights_that_cannot_be_had_do(doomed: tuple[SGLangServer, Target], what: str) -> None:
    server, target = doomed
    with pytest.raises(aiohttp.ClientError):
        target.with_http(lambda http: http.control(*PIECES[what]))
    assert server.process.wait(30) == 1
