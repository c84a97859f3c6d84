"""What custom functions post: a condition of the engines is borne in time, a refusal is told at once."""

import argparse
import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fa_rollout.config import ConfigError
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.slime.arguments import check_arguments
from fa_rollout.slime.generation import transport
from fa_rollout.slime.generation.transport import PostFailed, Transport

FINE = {"text": "a", "output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}}


def told(code: int) -> dict[str, Any]:
    finish = {"type": "abort", "message": "said so", "status_code": code}
    return {"text": "", "output_ids": [], "meta_info": {"finish_reason": finish}}


def posted(
    monkeypatch: pytest.MonkeyPatch, *plays: Any, max_retries: int = 1, **options: Any
) -> tuple[Any, int]:
    """The answer to one post, whose first tries are answered by these, and the number of tries."""
    monkeypatch.setattr(transport, "RETRY_S", 0.001)
    left, count = list(plays), 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        play = left.pop(0) if left else FINE
        if play == "late":
            await asyncio.sleep(5.0)
        if isinstance(play, int):
            return web.Response(status=play, text="said so", headers={"Location": "/other"})
        return web.json_response(play)

    async def run() -> Any:
        application = web.Application()
        application.router.add_post("/generate", handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        router = f"http://127.0.0.1:{runner.addresses[0][1]}"
        book = VersionBook(lineage="x", published=0, follows=True)
        async with aiohttp.ClientSession() as session:
            try:
                post = Transport(session, book=book, router=router, patience_s=20.0).post
                return await post(None, f"{router}/generate", {}, max_retries, **options)
            finally:
                await runner.cleanup()

    return asyncio.run(run()), count


def test_conditions_of_the_engines_spend_no_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    plays = [429, 503, 500, 502, told(503), told(429), told(500)]
    assert posted(monkeypatch, *plays) == (FINE, len(plays) + 1)


@pytest.mark.parametrize("play", [400, 422, 401, 307, told(400)])
def test_what_is_refused_is_told_at_once(monkeypatch: pytest.MonkeyPatch, play: Any) -> None:
    with pytest.raises(PostFailed, match="said so"):
        posted(monkeypatch, play, 400, max_retries=5)


def test_an_attempt_ends_at_its_timeout_and_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert posted(monkeypatch, "late", timeout=0.2, score_centering_top_k=None) == (FINE, 2)


def test_answers_for_score_centering_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PostFailed, match="score-centering"):
        posted(monkeypatch, score_centering_top_k=8)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rollout_data_transport", "straw"), ("flush_cache_interval", 4), ("use_score_centering", True)],
)
def test_modes_that_lose_prompts_or_versions_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        check_arguments(argparse.Namespace(**{name: value}))
