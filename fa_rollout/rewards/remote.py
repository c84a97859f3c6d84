"""A reward that a server gives: `reward.function = "http://host:port/path"`.

In: a sample, sent as a JSON object; with `reward.group`, `{"samples": [...]}`. Out: the JSON of the answer,
read as a local function's result would be: a number, an object with `reward.key`, or a list for a group. Only
what may pass (no connection, 429, 5xx) is tried again, within `reward.timeout_s`.
"""

import asyncio
import os
import random
from typing import Any

import aiohttp
import msgspec

from fa_rollout.sample import Sample

MAX_ATTEMPTS = 4
FIRST_BACKOFF_S = 0.2
MAX_CONNECTIONS = 256
KEY_VARIABLE = "FA_ROLLOUT_REWARD_KEY"
"""The server's key, if it wants one; from the environment, so that no file has to hold it."""
_FIELDS = ("group", "member", "attempt", "epoch", "prompt_index", "prompt", "label", "metadata", "response")


class RemoteRewardError(RuntimeError):
    """The server did not give a reward; the sample counts as failed."""


class RemoteReward:
    """Asks a server for rewards; an async callable like a user's own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, given: Sample | list[Sample]) -> Any:
        """The server's answer.

        Raises:
            RemoteRewardError: it refused, or did not answer well after several attempts.
        """
        body = msgspec.json.encode(_described(given))
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                async with self._connected().post(self._url, data=body) as reply:
                    text = await reply.read()
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if reply.status == 200:
                return _decoded(text, self._url)
            problem = f"status {reply.status}: {text[:200].decode(errors='replace')}"
            if reply.status != 429 and reply.status < 500:
                break
        raise RemoteRewardError(f"{self._url} gave no reward in {attempt + 1} attempts; the last: {problem}")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = os.environ.get(KEY_VARIABLE)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None),  # the runner's own limit holds
                headers={"Content-Type": "application/json"}
                | ({"Authorization": f"Bearer {key}"} if key else {}),
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _described(given: Sample | list[Sample]) -> dict[str, Any]:
    if isinstance(given, list):
        return {"samples": [_described(sample) for sample in given]}
    described = {name: getattr(given, name) for name in _FIELDS}
    return {**described, "finish_reason": given.finish_reason, "num_tokens": len(given.response_ids)}


def _decoded(text: bytes, url: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RemoteRewardError(f"{url} must answer with JSON, found {text[:200]!r} ({error})") from error
