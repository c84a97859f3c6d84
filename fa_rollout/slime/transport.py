"""slime's `post` over a lean connection: what custom generate functions call, unchanged, at less cost.

In: url, payload, retries and headers as slime's `http_utils._post` takes them. Out: the decoded answer.
Invariant: an answer that says the request is wrong raises at once; all else is tried again as slime does,
once a second, and the last failure is raised. An answer of the trained model under weights of an unknown
version is never passed on: it is asked for again until slime has updated that engine.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.slime.errand import engines_at_work
from trainer_hook.record import UNKNOWN_VERSION

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_STALLS = 600
"""Answers in a row that are of no use, at one or two seconds each. Each update of slime's may bring one to a
request that waits its turn, and an engine that was started anew gives nothing else until it is updated."""
_HEADERS = {"Content-Type": "application/json"}


class PostFailed(RuntimeError):
    """An engine refused a request, or failed again and again."""


class Transport:
    """Posts to engines and routers."""

    def __init__(self, session: aiohttp.ClientSession, *, book: VersionBook, router: str) -> None:
        """
        Args:
            router: before the engines of the model that is trained; versions that other models tell, or do
                not tell, mean nothing.
        """
        self._session = session
        self._book = book
        self._own = f"{router}/"

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
            PostFailed: the answer is 4xx, `max_retries` attempts failed, or the version stays unknown.
        """
        body = msgspec.json.encode(payload or {})
        for _ in range(MAX_STALLS):
            with engines_at_work():
                answer = await self._answer(url, body, max_retries, {**_HEADERS, **(headers or {})})
            if not (url.startswith(self._own) and self._is_of_unknown_version(answer)):
                return answer
            await asyncio.sleep(RETRY_S)
        raise PostFailed(f"POST {url} was answered {MAX_STALLS} times by engines that slime never updated")

    def _is_of_unknown_version(self, answer: Any) -> bool:
        """Whether an engine answered that has the weights of its start, while others were updated."""
        metas = [one.get("meta_info") for one in _answers(answer)]
        labels = [meta["weight_version"] for meta in metas if meta and "weight_version" in meta]
        return UNKNOWN_VERSION in self._book.follow_answers(labels)

    async def _answer(self, url: str, body: bytes, max_retries: int, headers: Mapping[str, str]) -> Any:
        for attempt in range(1, max_retries + 1):
            try:
                return await self._once(url, body, headers)
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


def _answers(answer: Any) -> list[dict[str, Any]]:
    """The objects of an answer: one, or as many as a request of several prompts has."""
    return [one for one in (answer if isinstance(answer, list) else [answer]) if isinstance(one, dict)]
