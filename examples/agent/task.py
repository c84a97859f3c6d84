"""An agent of pydantic-ai that answers what an article costs; only its model's address is the run's."""

import json
from functools import cache
from pathlib import Path

from pydantic_ai import Agent, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from fa_rollout.agents import AgentSession
from fa_rollout.generator.agents.parsing import Parsed, tool_call

shop = Agent(deps_type=list, retries=0)


@cache
def prices() -> dict[str, str]:
    """What the tool knows, and the model does not."""
    return json.loads(Path("work/prices.json").read_text())


@shop.tool
def price(context: RunContext[list], article: str) -> str:
    """Price of an article."""
    context.deps.append(article)
    return prices()[article]


async def agent(session: AgentSession) -> float:
    """Half for asking after the right article, half for the right answer."""
    model = OpenAIChatModel(session.model, provider=OpenAIProvider(openai_client=session.openai))
    asked: list[str] = []
    try:
        limits = UsageLimits(request_limit=2)
        result = await shop.run(session.prompt, model=model, deps=asked, usage_limits=limits)
        answer = result.output
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        answer = None
    is_right = asked == [session.prompt]
    return 0.5 * is_right + 0.5 * (is_right and answer == session.label)


def parse(text: str) -> Parsed:
    """A capital letter is a call; models with a chat template of their own need no such function."""
    if text in ("A", "B", "C", "D", "E", "F"):
        return Parsed(text="", calls=(tool_call("price", {"article": text.lower()}),))
    return Parsed(text=text)


def reward(sample) -> float:
    """Never asked: the agent returns its reward."""
    return 0.0
