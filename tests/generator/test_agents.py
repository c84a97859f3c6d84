"""The gateway with real clients: whatever wire they speak, trained tokens are those that were sampled."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import numpy.typing as npt
import openai
import pytest

from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.generator.agents.gateway import Gateway
from fa_rollout.generator.agents.history import History
from fa_rollout.generator.agents.parsing import parser_of
from fa_rollout.generator.agents.rendering import Rendering
from fa_rollout.generator.agents.session import Session
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import FinishReason, Sample
from tests.generator.samples import fresh_sample
from trainer_hook.record import VersionSpan

CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
CHATML = (
    "{% if tools %}<|system|>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call><eos>'


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 110))

    return run


Clients = tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]


class Engines:
    """Answers in the order given; remembers every prompt and every answer."""

    def __init__(self, tokenizer: Tokenizer, *answers: str) -> None:
        self._tokenizer = tokenizer
        self._answers = list(answers)
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, input_ids: npt.ArrayLike, sampling_params: dict[str, Any]) -> Turn:
        ids = self._tokenizer.encode(self._answers.pop(0))
        self.prompts.append(np.asarray(input_ids).tolist())
        self.sampled.append(ids.tolist())
        await self.hold.wait()
        return Turn(
            input_ids=np.asarray(input_ids, np.int32),
            output_ids=ids,
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            version_spans=(VersionSpan(3, len(ids)),),
            finish_reason=FinishReason.STOP,
        )

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"), characters=CHARACTERS)
    (folder / "chat_template.jinja").write_text(CHATML)
    return Tokenizer.load(folder)


@asynccontextmanager
async def session_of(tokenizer: Tokenizer, engines: Engines) -> AsyncIterator[tuple[Session, str]]:
    gateway = Gateway("127.0.0.1", 0, "policy")
    await gateway.start()
    rendering = Rendering(tokenizer, {})
    assert rendering.extension.by_user
    assert rendering.extension.by_tools
    session = Session(
        engines=engines,
        history=History(rendering, fresh_sample()),
        parse=parser_of("hermes", opens_thinking=False),
        params={"max_new_tokens": 100, "temperature": 1.0},
        eos_ids=tokenizer.eos_ids,
    )
    gateway.add(session)
    yield session, gateway.address_of(session)
    gateway.remove(session)
    await gateway.aclose()


@asynccontextmanager
async def clients(session: Session, address: str, **options: Any) -> AsyncIterator[Clients]:
    """Real ones, on the session's address."""
    chat = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=session.secret, **options)
    messages = anthropic.AsyncAnthropic(base_url=address, api_key=session.secret, **options)
    async with chat, messages:
        yield chat, messages


def check_truth(samples: list[Sample], engines: Engines) -> None:
    """Every sampled token is trained once, with its own id and log-probability."""
    trained = [
        (ident, logprob)
        for sample in samples
        for ident, logprob, mask in zip(
            sample.response_ids.tolist(), sample.logprobs.tolist(), sample.loss_mask.tolist(), strict=True
        )
        if mask
    ]
    sampled = [(ident, -float(n)) for ids in engines.sampled for n, ident in enumerate(ids, 1)]
    assert sorted(trained) == sorted(sampled)


@on_a_loop
async def test_chat_tool_loop_is_one_sample(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, CALL, "It is 3.<eos>", "You are welcome.<eos>")
    async with (
        session_of(tokenizer, engines) as (session, address),
        clients(session, address) as (client, _),
    ):
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        first = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls"
        call = message.tool_calls[0]
        assert (message.content, call.function.name, call.function.arguments) == (
            "Let me see.",
            "add",
            '{"a":1}',
        )
        resent = {
            "role": "assistant",
            "content": None,  # left out, as some frameworks do
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            ],
        }
        messages += [resent, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        async with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
            second = await stream.get_final_completion()
        assert second.choices[0].message.content == "It is 3."
        messages += [{"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "Thanks"}]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        samples = await session.close()
    assert len(samples) == 1
    check_truth(samples, engines)
    ids = [*samples[0].prompt_ids.tolist(), *samples[0].response_ids.tolist()]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith(
        "<|user|>1+2?<eos>\n<|assistant|>Let me see."
        '<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call>'
        "<eos>\n<|tool|>3<eos>\n<|assistant|>It is 3.<eos>\n<|user|>Thanks<eos>\n"
        "<|assistant|>You are welcome.<eos>"
    )


@on_a_loop
async def test_a_rewritten_answer_is_a_branch(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, "One.<eos>", "Two.<eos>", "Three.<eos>")
    async with (
        session_of(tokenizer, engines) as (session, address),
        clients(session, address) as (client, _),
    ):
        start: list[Any] = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model="m", messages=start)
        for answer in ("One, rewritten.", "One."):
            messages = [*start, {"role": "assistant", "content": answer}, {"role": "user", "content": "b"}]
            await client.chat.completions.create(model="m", messages=messages)
        samples = await session.close()
    assert [sample.loss_mask.sum() for sample in samples] == [5 + 7, 5]
    check_truth(samples, engines)


@on_a_loop
async def test_anthropic_tool_loop_is_one_sample(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, CALL, "It is 3.<eos>")
    tools: Any = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
    async with (
        session_of(tokenizer, engines) as (session, address),
        clients(session, address) as (_, client),
    ):
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        first = await client.messages.create(
            model="m", max_tokens=50, messages=messages, tools=tools, system="Be brief."
        )
        assert first.stop_reason == "tool_use"
        used = next(block for block in first.content if block.type == "tool_use")
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "3"}]},
        ]
        async with client.messages.stream(
            model="m", max_tokens=50, messages=messages, tools=tools, system="Be brief."
        ) as stream:
            second = await stream.get_final_message()
        assert second.content[0].type == "text"
        assert second.content[0].text == "It is 3."
        samples = await session.close()
    assert len(samples) == 1
    check_truth(samples, engines)


@pytest.mark.parametrize("by_id", [False, True])
@on_a_loop
async def test_responses_tool_loop_is_one_sample(tokenizer: Tokenizer, by_id: bool) -> None:
    engines = Engines(tokenizer, CALL, "It is 3.<eos>")
    tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    async with (
        session_of(tokenizer, engines) as (session, address),
        clients(session, address) as (client, _),
    ):
        first = await client.responses.create(model="m", input="1+2?", tools=tools, instructions="Be brief.")
        call = next(item for item in first.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if by_id:
            second = await client.responses.create(
                model="m", input=[output], tools=tools, previous_response_id=first.id
            )
            assert second.output_text == "It is 3."
        else:
            items: Any = [{"role": "user", "content": "1+2?"}, *first.output, output]
            async with client.responses.stream(
                model="m", input=items, tools=tools, instructions="Be brief."
            ) as stream:
                second = await stream.get_final_response()
            assert second.output_text == "It is 3."
        samples = await session.close()
    assert len(samples) == 1
    check_truth(samples, engines)


@on_a_loop
async def test_a_clients_retry_joins_the_running_call(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, "Slow.<eos>", "Other.<eos>")
    engines.hold.clear()
    async with (
        session_of(tokenizer, engines) as (session, address),
        clients(session, address, timeout=0.2, max_retries=2) as (client, _),
    ):
        asyncio.get_running_loop().call_later(0.6, engines.hold.set)
        messages: list[Any] = [{"role": "user", "content": "a"}]
        answer = await client.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "Slow."
        samples = await session.close()
    assert len(engines.prompts) == 1
    check_truth(samples, engines)


@on_a_loop
async def test_failures_come_in_the_wires_own_form_and_are_not_retried(tokenizer: Tokenizer) -> None:
    messages: list[Any] = [{"role": "user", "content": "a"}]
    async with (
        session_of(tokenizer, Engines(tokenizer)) as (session, address),
        clients(session, address) as (chat, other),
    ):
        with pytest.raises(openai.BadRequestError, match="n = 2 is not supported") as caught:
            await chat.chat.completions.create(model="m", messages=messages, n=2)
        assert caught.value.param == "n"
        with pytest.raises(openai.AuthenticationError):
            await chat.with_options(api_key="wrong").chat.completions.create(model="m", messages=messages)
        await session.close()
        with pytest.raises(anthropic.APIStatusError, match="this session has ended"):
            await other.messages.create(model="m", max_tokens=5, messages=messages)
