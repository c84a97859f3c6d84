"""While all engines are lost, the work is tried again often, and a person reads of it once a minute."""

import asyncio

import pytest

from fa_rollout.client.base.errors import ControlFailed
from fa_rollout.generator.base import patience


def test_of_many_failures_the_first_of_a_minute_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RECOVERY_RETRY_S", 0.01)
    heard: list[bool] = []

    async def work() -> int:
        if len(heard) < 5:
            raise ControlFailed("no engine is left")
        return 7

    found = asyncio.run(patience.outlasting_losses(work, lambda _, is_news: heard.append(is_news), 10.0))
    assert found == 7
    assert heard == [True, False, False, False, False]
