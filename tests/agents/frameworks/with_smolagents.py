"""smolagents' ToolCallingAgent, which rewrites its history: every call is a branch."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: another
    """
    return a + b


agent = ToolCallingAgent(tools=[add], model=OpenAIServerModel("policy"), max_steps=3)
agent.run("Add.")
