"""AutoGen's AssistantAgent."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    info = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="policy", model_info={**info, "structured_output": True})
    agent = AssistantAgent("adder", client, tools=[add], max_tool_iterations=5)
    found = await agent.run(task="Add.")
    assert found.messages[-1].content == "It is 7.", found


asyncio.run(main())
