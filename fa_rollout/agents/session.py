"""What an agent works with: the address of its own session, the row, and clients if they are installed."""

from dataclasses import dataclass
from functools import cache
from typing import Any

MODEL = "policy"
"""The model's name for clients; any name is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """One rollout of one row.

    ```python
    async def agent(session: AgentSession) -> float:
        answer = await session.openai.chat.completions.create(model=session.model, messages=session.messages)
        return float(session.label in answer.choices[0].message.content)
    ```
    """

    base_url: str
    """For OpenAI clients; it ends in `/v1`."""
    api_key: str
    """The session's secret, for all clients."""
    prompt: Any
    """Of the row: text, or chat messages."""
    label: Any
    metadata: dict[str, Any]
    is_async: bool = True
    """The agent is an async function: its clients are async too."""

    @property
    def model(self) -> str:
        return MODEL

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic clients, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def row(self) -> dict[str, Any]:
        """Prompt, label and metadata."""
        return {"prompt": self.prompt, "label": self.label, "metadata": self.metadata}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The row's prompt as chat messages."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]

    @property
    def openai(self) -> Any:
        """An `openai.AsyncOpenAI` for this session, or `openai.OpenAI` where the agent is a plain function.

        Raises:
            ModuleNotFoundError: the package openai is not installed.
        """
        return _openai(self.is_async).copy(base_url=self.base_url, api_key=self.api_key)

    @property
    def anthropic(self) -> Any:
        """The same for Anthropic.

        Raises:
            ModuleNotFoundError: the package anthropic is not installed.
        """
        return _anthropic(self.is_async).copy(base_url=self.anthropic_base_url, api_key=self.api_key)


@cache
def _openai(is_async: bool) -> Any:
    """One for the process: its copies share the pool of connections."""
    import openai

    return (openai.AsyncOpenAI if is_async else openai.OpenAI)(base_url="http://unset", api_key="unset")


@cache
def _anthropic(is_async: bool) -> Any:
    import anthropic

    make = anthropic.AsyncAnthropic if is_async else anthropic.Anthropic
    return make(base_url="http://unset", api_key="unset")
