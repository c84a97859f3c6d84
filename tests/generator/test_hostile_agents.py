"""Agents that misbehave: each sampled token is trained once, or not at all if no client received it."""

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.agents.messages import ChatMessage
from fa_rollout.generator.agents.rendering import Rendering
from tests.generator.test_agents import (
    CALL,
    TOOLS,
    Engines,
    check_truth,
    clients,
    on_a_loop,
    session_of,
    tokenizer,
)

__all__ = ["tokenizer"]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def said(text: str) -> Any:
    return {"role": "assistant", "content": text}


@on_a_loop
async def test_parallel_answers_to_one_history_are_branches(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, "One.<eos>", "Two.<eos>", "Three.<eos>", "Four.<eos>")
    async with session_of(tokenizer, engines) as (session, address), clients(session, address) as (client, _):
        await client.chat.completions.create(model="m", messages=[user("a")])
        messages = [user("a"), said("One."), user("b")]
        asks = [client.chat.completions.create(model="m", messages=messages) for _ in range(3)]
        await asyncio.gather(*asks)
        samples = await session.close()
    assert len(samples) == 3
    check_truth(samples, engines)


@on_a_loop
async def test_an_answer_that_no_client_received_is_not_trained_and_its_repetition_is_free(
    tokenizer: Tokenizer,
) -> None:
    engines = Engines(tokenizer, "Never seen.<eos>", "Nor this.<eos>", "Seen.<eos>")
    async with session_of(tokenizer, engines) as (session, address), clients(session, address) as (client, _):
        engines.hold.clear()
        for stream in (False, False, True, True):
            await drop(f"{address}/v1/chat/completions", session.secret, [user("a")], stream=stream)
        engines.hold.set()
        await asyncio.sleep(0.1)
        await client.chat.completions.create(model="m", messages=[user("b")])
        samples = await session.close()
    texts = [tokenizer.decode(sample.response_ids) for sample in samples]
    assert texts == ["Seen."]
    assert len(engines.prompts) == 3, "the second request for an answer under way joins it"


async def drop(url: str, key: str, messages: list[Any], *, stream: bool) -> None:
    """Ask, and leave before the answer comes."""
    body = {"model": "m", "messages": messages, "stream": stream and None}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        task = asyncio.ensure_future(client.post(url, json=body))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait({task})
    await asyncio.sleep(0.1)


@on_a_loop
async def test_edits_of_old_messages_and_other_system_prompts_are_branches(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, *[f"{n}.<eos>" for n in range(5)])
    async with session_of(tokenizer, engines) as (session, address), clients(session, address) as (client, _):
        histories: list[Any] = [
            [{"role": "system", "content": "A"}, user("q")],
            [{"role": "system", "content": "B"}, user("q")],
            [{"role": "system", "content": "A"}, user("q"), said("0."), user("r")],
            [{"role": "system", "content": "A"}, user("edited"), said("0."), user("r")],
            [{"role": "system", "content": "A"}, user("q"), said("0."), user("r"), said("2."), user("s")],
        ]
        for messages in histories:
            await client.chat.completions.create(model="m", messages=messages)
        samples = await session.close()
    assert len(samples) == 3
    check_truth(samples, engines)


@on_a_loop
async def test_a_system_prompt_beside_the_messages_is_part_of_the_history(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, "One.<eos>", "Two.<eos>")
    async with session_of(tokenizer, engines) as (session, address), clients(session, address) as (_, client):
        for system in ("A", "B"):
            await client.messages.create(model="m", max_tokens=9, system=system, messages=[user("q")])
        samples = await session.close()
    prompts = [tokenizer.decode(sample.prompt_ids) for sample in samples]
    assert ["<|system|>A" in prompts[0], "<|system|>B" in prompts[1]] == [True, True]
    check_truth(samples, engines)


@on_a_loop
async def test_two_hundred_turns_and_huge_results_are_one_sample(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, *[CALL] * 200, "End.<eos>")
    async with session_of(tokenizer, engines) as (session, address), clients(session, address) as (client, _):
        messages: list[Any] = [user("go")]
        for turn in range(200):
            answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            assert message.tool_calls
            result = "x" * (100_000 if turn == 100 else 20)
            messages += [
                message,
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result},
            ]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        samples = await session.close()
    assert len(samples) == 1
    check_truth(samples, engines)


@on_a_loop
async def test_unusable_requests_are_refused_in_the_form_of_their_wire(
    tokenizer: Tokenizer,
) -> None:
    engines = Engines(tokenizer)
    async with session_of(tokenizer, engines) as (session, address), clients(session, address) as (client, _):
        image = {"role": "user", "content": [{"type": "image"}]}
        wrong: list[Any] = [[], [user("a"), said("prefilled")], [image]]
        for messages in wrong:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=messages)
        async with aiohttp.ClientSession(headers={"x-api-key": session.secret}) as other:
            for body in ("", "[]", "nonsense", json.dumps({"messages": 3})):
                async with other.post(f"{address}/v1/messages", data=body) as answer:
                    assert answer.status == 400
                    assert (await answer.json())["type"] == "error"
        assert await session.close() == []


def test_the_seam_keeps_what_was_not_sampled_and_doubles_nothing(tokenizer: Tokenizer) -> None:
    rendering = Rendering(tokenizer, {})
    answer, new = ChatMessage(role="assistant", text="x"), [ChatMessage(role="user", text="y")]
    ended = tokenizer.encode("x<eos>")
    cut = tokenizer.encode("x")
    after_end = tokenizer.decode(rendering.added(answer, new, None, ended), skip_special_tokens=False)
    after_cut = tokenizer.decode(rendering.added(answer, new, None, cut), skip_special_tokens=False)
    assert after_end == "\n<|user|>y<eos>\n<|assistant|>"
    assert after_cut == "<eos>" + after_end
    nothing = rendering.added(answer, new, None, np.empty(0, np.int32))
    assert tokenizer.decode(nothing, skip_special_tokens=False) == after_cut
