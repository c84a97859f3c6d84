"""Agents as users write them, for `test_agent_truth`."""

import asyncio
import json
import os
import urllib.request
from typing import Any

from fa_rollout.agents import AgentSession


async def talker(session: AgentSession) -> float:
    """Three turns, two answers to one question at once, and a history that it edits at the end."""
    client, messages = session.openai, session.messages
    for _ in range(3):
        answer = await client.chat.completions.create(model=session.model, messages=messages)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": "123"}]
    ask = client.chat.completions.create
    await asyncio.gather(*[ask(model=session.model, messages=messages) for _ in range(2)])
    edited = [messages[0], {"role": "assistant", "content": "321"}, {"role": "user", "content": "45="}]
    answer = await client.chat.completions.create(model=session.model, messages=edited)
    return float(len(answer.choices[0].message.content))


def program() -> None:
    """The same session, from a program without any client."""
    row = json.load(__import__("sys").stdin)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        answer = _post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", {"messages": messages})
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "123"}]
    _post(os.environ["FA_ROLLOUT_REWARD_URL"], {"reward": len(messages)})


def _post(url: str, body: dict[str, Any]) -> Any:
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    program()
