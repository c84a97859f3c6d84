"""slime's `post` over a lean connection: what custom generate functions call, unchanged, at less cost.

In: url, payload, retries and headers as slime's `http_utils._post` takes them. Out: the decoded answer.
Invariant: an answer that says the request is wrong raises at once; all else is tried again as slime does,
once a second, and the last failure is raised.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from fa_rollout.slime.errand import note_departure

logger = logging.getLogger(__name__)

RETRY_S = 1.0
_HEADERS = {"Content-Type": "application/json"}


class PostFailed(RuntimeError):
    """An engine refused a request, or failed again and again."""


class Transport:
    """Posts to engines and routers."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(
        self,
        client: object,
        url: str,
        payload: Any,
        max_retries: int = 60,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Stands where `http_utils._post` stands; slime's own client is not used.

        Raises:
            PostFailed: the answer is 4xx, or `max_retries` attempts failed.
        """
        body = msgspec.json.encode(payload or {})
        note_departure()
        for attempt in range(1, max_retries + 1):
            try:
                return await self._once(url, body, {**_HEADERS, **(headers or {})})
            except (aiohttp.ClientError, OSError) as error:
                logger.info("event=post_failed attempt=%d url=%s error=%r", attempt, url, error)
                if attempt == max_retries:
                    raise PostFailed(
                        f"POST {url} failed {max_retries} times, at last by {error!r}"
                    ) from error
            await asyncio.sleep(RETRY_S)
        raise ValueError(f"max_retries must be 1 or more, found {max_retries}")

    async def _once(self, url: str, body: bytes, headers: Mapping[str, str]) -> Any:
        async with self._session.post(url, data=body, headers=headers) as response:
            content = await response.read()
            if response.status in (408, 429) or response.status >= 500:
                raise aiohttp.ClientPayloadError(f"{response.status} {content[:500]!r}")
            if response.status >= 400:
                raise PostFailed(f"POST {url} must be accepted, found {response.status} {content[:500]!r}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            return content.decode(errors="replace")
