"""A reward that a server gives: `reward.function = "http://host:port/path"`.

In: a sample, sent as a JSON object; with `reward.group`, `{"samples": [...]}`. Out: the JSON of the answer,
read as a local function's result would be: a number, an object with `reward.key`, or a list for a group.

| the server | then |
|---|---|
| is overloaded (429, 503), in trouble (5xx) or away | it is asked again; the sample's time stands still |
| is so for longer than patience lasts | the run ends: no sample is to blame |
| breaks (500) on one sample again and again, and answers others | the sample has no reward |
| refuses (4xx), redirects, or answers something else than JSON | the sample has no reward |
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
"""As long as a server may ask to be left alone."""
MAX_CONNECTIONS = 256
MAX_ANSWER_BYTES = 1 << 26
KEY_VARIABLE = "FA_ROLLOUT_REWARD_KEY"
"""The server's key, if it wants one; from the environment, so that no file has to hold it."""
_FIELDS = ("group", "member", "attempt", "epoch", "prompt_index", "prompt", "label", "metadata", "response")
_ERROR_FIELDS = {"error", "object", "message", "type", "param", "code", "detail"}
_MAX_ERROR_BYTES = 200
_CONNECT_S = 10.0
_TOLD_S = 60.0
_SUSPECT = 500


class RemoteRewardError(RuntimeError):
    """The server did not give a reward; the sample counts as failed."""


class RewardServerLost(RewardsLost):
    """The reward server has answered nobody for longer than patience lasts."""


class _Condition(Exception):
    """The server does not answer now, whoever asks."""

    def __init__(self, text: str, *, status: int | None = None, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        self.after_s = after_s
        """Its own word on when to come again."""


class RemoteReward:
    """Asks a server for rewards."""

    def __init__(self, url: str, patience: Patience) -> None:
        self._url = url
        self._shown_url = masked_text(url)
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None
        self._rests_until = 0.0
        """Nobody asks before this time (time.monotonic()): it was overloaded."""
        self._told_s = float("-inf")
        self.warn: Callable[[str], None] = logger.warning
        """Told when the server begins to be in trouble, once a minute at most."""

    async def ask(self, given: Sample | list[Sample], deadline: Deadline) -> Any:
        """The server's answer. `deadline` is of one try, and stands still between tries.

        Raises:
            RemoteRewardError: it refused this sample.
            RewardServerLost: it answers nobody.
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
                        f"{self._shown_url} must answer without compression: none is asked for"
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
        if now_s - self._told_s > _TOLD_S:
            self._told_s = now_s
            limit = f"for {self._patience.limit_s:g} s (trainer.stall_s)"
            self.warn(
                f"the reward server {self._shown_url} does not answer ({condition}); rewards wait {limit}"
            )
        blame = self._patience.blame(trouble, now_s, is_suspect=condition.status == _SUSPECT)
        if blame is Blame.SERVER:
            raise RewardServerLost(
                f"the reward server {self._shown_url} must answer, and has answered nobody for "
                f"{self._patience.limit_s:g} s; the last: {condition}"
            )
        if blame is Blame.REQUEST:
            raise RemoteRewardError(
                f"{self._shown_url} gave no reward in {trouble.num_failures} attempts, and others had theirs "
                f"meanwhile; the last: {condition}"
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
    """What an answer of another status than 200 means."""
    said = f"status {reply.status}: {await read_start(reply, _MAX_ERROR_BYTES)}"
    if classify_status(reply.status).is_condition:
        return _Condition(said, status=reply.status, after_s=min(retry_after_s(reply), RETRY_AFTER_CAP_S))
    hint = key_hint(reply.status, KEY_VARIABLE) if reply.status in KEY_STATUSES else ""
    if reply.status < 400:
        hint = " (no redirect is followed: name the address itself)"
    return RemoteRewardError(f"{url} gave no reward: {said}{hint}")


def _described(given: Sample | list[Sample]) -> dict[str, Any]:
    if isinstance(given, list):
        return {"samples": [_described(sample) for sample in given]}
    described = {name: getattr(given, name) for name in _FIELDS}
    return {**described, "finish_reason": given.finish_reason, "num_tokens": len(given.response_ids)}


def _decoded(text: bytes, url: str) -> Any:
    """The answer; an error that came under status 200 is one all the same."""
    try:
        answer = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteRewardError(f"{url} must answer with JSON, found {text[:200]!r} ({error})") from error
    told = verdict_of(answer) if isinstance(answer, dict) and answer.keys() <= _ERROR_FIELDS else None
    if told is None or told.status is None:
        return answer
    if classify_status(told.status) in (FailureClass.TRANSIENT, FailureClass.OVERLOAD):
        raise _Condition(f"error {told}", status=told.status)
    raise RemoteRewardError(f"{url} gave no reward: error {told}")
