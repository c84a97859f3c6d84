"""Replaces slime's `post`, which custom generate functions call, with the same interface and less overhead.

In: url, payload, retries and headers as slime's `http_utils._post` takes them. Out: the decoded answer.
Invariant: a 4xx answer raises at once; other failures are retried once a second, as in slime, and the last
one is raised. Temporary failures of the trained model's engines (overload, a server error, a lost connection)
are retried as long as our own client retries. An answer under weights of an unknown version is never
returned: the request is repeated until slime has updated that engine.
"""

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import aiohttp
import msgspec

from fa_rollout.client.base.errors import AnswerTooLong
from fa_rollout.client.base.policy import classify_status
from fa_rollout.client.engine.network import key_hint, read_body, read_start
from fa_rollout.client.wire.verdict import status_of
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.slime.generation.group_context import engines_at_work
from trainer_hook.record import UNKNOWN_VERSION

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_STALLS = 600
"""Answers in a row that are of no use, at one or two seconds each. Each update of slime's may bring one to a
request that waits its turn, and an engine that was started anew gives nothing else until it is updated."""
MAX_ANSWER_BYTES = 1 << 30
"""Custom functions may ask for anything, such as hidden states of every token."""
_HEADERS = {"Content-Type": "application/json"}


_SHOWN = 500
"""Of an error's body."""


class PostFailed(RuntimeError):
    """An engine refused a request, or failed again and again."""


class Transport:
    """Posts to engines and routers."""

    def __init__(
        self, session: aiohttp.ClientSession, *, book: VersionBook, router: str, patience_s: float
    ) -> None:
        """
        Args:
            patience_s: how long the trained model's engines may be in trouble.
            router: before the engines of the model that is trained; versions that other models tell, or do
                not tell, mean nothing.
        """
        self._session = session
        self._book = book
        self._own = f"{router}/"
        self._patience_s = patience_s

    async def post(
        self,
        client: object,
        url: str,
        payload: Any,
        max_retries: int = 60,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        score_centering_top_k: int | None = None,
    ) -> Any:
        """Replaces `http_utils._post`; slime's own client is not used.

        Args:
            timeout: seconds that one attempt may take; None: as long as the session allows.

        Raises:
            PostFailed: score centering is asked for, the answer is 4xx, `max_retries` attempts failed, or the
                version stays unknown.
        """
        if score_centering_top_k is not None:
            raise PostFailed("fa_rollout cannot read answers for --use-score-centering")
        body = msgspec.json.encode(payload or {})
        options: dict[str, Any] = {"headers": {**_HEADERS, **(headers or {})}}
        if timeout is not None:
            options["timeout"] = aiohttp.ClientTimeout(total=timeout)
        for _ in range(MAX_STALLS):
            with engines_at_work():
                answer = await self._answer(url, body, max_retries, options)
            if not (url.startswith(self._own) and self._is_of_unknown_version(answer)):
                return answer
            await asyncio.sleep(RETRY_S)
        raise PostFailed(f"POST {url} was answered {MAX_STALLS} times by engines that slime never updated")

    def _is_of_unknown_version(self, answer: Any) -> bool:
        """Whether an engine answered that has the weights of its start, while others were updated."""
        metas = [one.get("meta_info") for one in _answers(answer)]
        labels = [meta["weight_version"] for meta in metas if meta and "weight_version" in meta]
        return UNKNOWN_VERSION in self._book.follow_answers(labels)

    async def _answer(self, url: str, body: bytes, max_retries: int, options: Mapping[str, Any]) -> Any:
        if max_retries < 1:
            raise ValueError(f"max_retries must be 1 or more, found {max_retries}")
        until_s = time.monotonic() + (self._patience_s if url.startswith(self._own) else 0.0)
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._once(url, body, options)
            except (aiohttp.ClientError, OSError) as error:
                logger.info("event=post_failed attempt=%d url=%s error=%r", attempt, url, error)
                if attempt >= max_retries and time.monotonic() >= until_s:
                    raise PostFailed(f"POST {url} failed {attempt} times, at last by {error!r}") from error
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))

    async def _once(self, url: str, body: bytes, options: Mapping[str, Any]) -> Any:
        async with self._session.post(url, data=body, allow_redirects=False, **options) as response:
            if response.status >= 300:
                _refuse(url, response.status, await read_start(response, _SHOWN))
            try:
                content = await read_body(response, MAX_ANSWER_BYTES)
            except AnswerTooLong as error:
                raise PostFailed(f"POST {url}: {error}") from error
        try:
            answer = msgspec.json.decode(content)
        except msgspec.DecodeError:
            return content.decode(errors="replace")
        if url.startswith(self._own):
            _check_verdicts(url, answer)
        return answer


def _check_verdicts(url: str, answer: Any) -> None:
    """Raise for an answer whose finish reason tells an error; one with tokens stands as an abort."""
    for one in _answers(answer):
        meta = one.get("meta_info")
        finish = meta.get("finish_reason") if isinstance(meta, dict) else None
        status = status_of(finish.get("status_code")) if isinstance(finish, dict) else None
        if status is None or (one.get("output_ids") and classify_status(status).is_condition):
            continue
        _refuse(url, status, str(finish.get("message"))[:_SHOWN] if isinstance(finish, dict) else "")


def _refuse(url: str, status: int, text: str) -> NoReturn:
    """Raise the error for a status: retried, or final."""
    if classify_status(status).is_condition:
        raise aiohttp.ClientPayloadError(f"{status} {text}")
    raise PostFailed(f"POST {url} was refused: {status} {text}{key_hint(status)}")


def _answers(answer: Any) -> list[dict[str, Any]]:
    """The objects of an answer: one, or as many as a request of several prompts has."""
    return [one for one in (answer if isinstance(answer, list) else [answer]) if isinstance(one, dict)]
