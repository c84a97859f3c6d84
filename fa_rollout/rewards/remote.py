"""Rewards from a server: `reward.function = "http://host:port/path"`.

In: a sample, sent as a JSON object; with `reward.group`, `{"samples": [...]}`. Out: the JSON of the response,
read like a local function's result: a number, an object with `reward.key`, or a list for a group.

| the server | then |
|---|---|
| is overloaded (429, 503), fails (5xx) or is unreachable | the request is retried; the sample's clock stops |
| stays so beyond the limit (`trainer.stall_s`) | the run ends; no sample is to blame |
| fails (500) repeatedly on one sample and answers others | the sample has no reward |
| refuses (4xx), redirects, or does not answer with JSON | the sample has no reward |
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from fa_rollout.client.base.errors import AnswerTooLong, FailureClass
from fa_rollout.client.base.patience import Blame, Patience, Trouble
from fa_rollout.client.base.policy import KEY_STATUSES, classify_status
from fa_rollout.client.engine.network import key_hint, read_body, read_start, retry_after_s
from fa_rollout.client.wire.verdict import verdict_of
from fa_rollout.process.masking import masked_text
from fa_rollout.rewards.outcomes import RewardsLost
from fa_rollout.sample import Sample
from fa_rollout.user_code.deadline import Deadline

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.2
BACKOFF_CAP_S = 10.0
RETRY_AFTER_CAP_S = 30.0
"""The longest Retry-After that is respected."""
MAX_CONNECTIONS = 256
MAX_ANSWER_BYTES = 1 << 26
KEY_VARIABLE = "FA_ROLLOUT_REWARD_KEY"
"""The server's key, if it needs one; read from the environment, so that no file has to hold it."""
_FIELDS = ("group", "member", "attempt", "epoch", "prompt_index", "prompt", "label", "metadata", "response")
_ERROR_FIELDS = {"error", "object", "message", "type", "param", "code", "detail"}
_MAX_ERROR_BYTES = 200
_CONNECT_S = 10.0
_WARN_INTERVAL_S = 60.0
_SUSPECT = 500


class RemoteRewardError(RuntimeError):
    """The server did not return a reward; the sample fails."""


class RewardServerLost(RewardsLost):
    """The reward server has answered no request for `trainer.stall_s`."""


class _Condition(Exception):
    """The server is temporarily unavailable for all requests."""

    def __init__(self, text: str, *, status: int | None = None, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        self.after_s = after_s
        """Its Retry-After."""


class RemoteReward:
    """Requests rewards from a server."""

    def __init__(self, url: str, patience: Patience) -> None:
        self._url = url
        self._shown_url = masked_text(url)
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None
        self._rests_until = 0.0
        """No request is sent before this time (time.monotonic()), after an overload."""
        self._warned_s = float("-inf")
        self.warn: Callable[[str], None] = logger.warning
        """Called when the server becomes unavailable, at most once a minute."""

    async def ask(self, given: Sample | list[Sample], deadline: Deadline) -> Any:
        """The server's response. `deadline` limits one attempt; its clock stops between attempts.

        Raises:
            RemoteRewardError: the server refused this sample.
            RewardServerLost: the server answers no request.
        """
        body = msgspec.json.encode(_described(given))
        trouble: Trouble | None = None
        try:
            while True:
                with deadline.paused():
                    rest_s = max(0.0, self._rests_until - time.monotonic())
                    await asyncio.sleep(rest_s * random.uniform(1.0, 1.5))
                try:
                    answer = await self._once(body)
                except _Condition as condition:
                    trouble = self._bear(trouble, condition)
                else:
                    self._patience.answered(time.monotonic())
                    return answer
                deadline.renew()
                with deadline.paused():
                    await asyncio.sleep(_backoff_s(trouble.num_failures))
        finally:
            if trouble is not None:
                trouble.end()

    async def _once(self, body: bytes) -> Any:
        try:
            async with self._connected().post(self._url, data=body, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise await _refusal(self._shown_url, reply)
                if reply.headers.get("Content-Encoding", "identity") != "identity":
                    raise RemoteRewardError(
                        f"{self._shown_url} must answer without compression: the request does not accept any"
                    )
                text = await read_body(reply, MAX_ANSWER_BYTES)
        except (AnswerTooLong, aiohttp.InvalidURL) as error:
            raise RemoteRewardError(masked_text(f"{self._shown_url}: {error}")) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Condition(masked_text(f"{type(error).__name__}: {error}")) from error
        return _decoded(text, self._shown_url)

    def _bear(self, trouble: Trouble | None, condition: _Condition) -> Trouble:
        now_s = time.monotonic()
        trouble = self._patience.met(trouble, now_s)
        if condition.status in (429, 503) or condition.after_s:
            rest_s = max(condition.after_s, _backoff_s(trouble.num_failures))
            self._rests_until = max(self._rests_until, now_s + rest_s)
        if now_s - self._warned_s > _WARN_INTERVAL_S:
            self._warned_s = now_s
            limit = f"for {self._patience.limit_s:g} s (trainer.stall_s)"
            self.warn(f"the reward server {self._shown_url} does not answer ({condition}); retrying {limit}")
        blame = self._patience.blame(trouble, now_s, is_suspect=condition.status == _SUSPECT)
        if blame is Blame.SERVER:
            raise RewardServerLost(
                f"the reward server {self._shown_url} has answered no request for "
                f"{self._patience.limit_s:g} s (trainer.stall_s); last error: {condition}"
            )
        if blame is Blame.REQUEST:
            raise RemoteRewardError(
                f"{self._shown_url} returned no reward in {trouble.num_failures} attempts, but answered "
                f"other samples meanwhile; last error: {condition}"
            )
        return trouble

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = os.environ.get(KEY_VARIABLE)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                headers={"Content-Type": "application/json"}
                | ({"Authorization": f"Bearer {key}"} if key else {}),
                skip_auto_headers=("Accept-Encoding",),
                auto_decompress=False,
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _backoff_s(num_failures: int) -> float:
    longest_s = min(BACKOFF_CAP_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures, 16))
    return longest_s * random.uniform(0.5, 1.0)


async def _refusal(url: str, reply: aiohttp.ClientResponse) -> Exception:
    """The error for a response with a status other than 200."""
    said = f"status {reply.status}: {await read_start(reply, _MAX_ERROR_BYTES)}"
    if classify_status(reply.status).is_condition:
        return _Condition(said, status=reply.status, after_s=min(retry_after_s(reply), RETRY_AFTER_CAP_S))
    hint = key_hint(reply.status, KEY_VARIABLE) if reply.status in KEY_STATUSES else ""
    if reply.status < 400:
        hint = " (redirects are not followed: set the final address)"
    return RemoteRewardError(f"{url} returned no reward: {said}{hint}")


def _described(given: Sample | list[Sample]) -> dict[str, Any]:
    if isinstance(given, list):
        return {"samples": [_described(sample) for sample in given]}
    described = {name: getattr(given, name) for name in _FIELDS}
    return {**described, "finish_reason": given.finish_reason, "num_tokens": len(given.response_ids)}


def _decoded(text: bytes, url: str) -> Any:
    """The decoded response; an error object with status 200 still counts as an error."""
    try:
        answer = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteRewardError(f"{url} must answer with JSON, found {text[:200]!r} ({error})") from error
    told = verdict_of(answer) if isinstance(answer, dict) and answer.keys() <= _ERROR_FIELDS else None
    if told is None or told.status is None:
        return answer
    if classify_status(told.status) in (FailureClass.TRANSIENT, FailureClass.OVERLOAD):
        raise _Condition(f"error {told}", status=told.status)
    raise RemoteRewardError(f"{url} returned no reward: error {told}")
