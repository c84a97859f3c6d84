"""openai-agents on the chat wire, then on Responses."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    return a + b


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind("policy", openai_client=AsyncOpenAI())
        result = await Runner.run(Agent(name="adder", model=model, tools=[add]), "Add.")
        assert result.final_output == "It is 7.", result.final_output


asyncio.run(main())
