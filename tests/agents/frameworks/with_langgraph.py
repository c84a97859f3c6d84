"""LangGraph's agent by LangChain."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model="policy"), [add])
found = agent.invoke({"messages": [{"role": "user", "content": "Add."}]})
assert found["messages"][-1].content == "It is 7.", found
