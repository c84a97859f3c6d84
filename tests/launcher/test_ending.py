"""The table of ends."""

import signal

import pytest

from fa_rollout.launcher.ending import EXIT_CODES, Cause, ending


def end(cause: Cause, **known: object) -> object:
    facts = {"trainer_code": None, "hub_code": None, "grace_s": 10.0} | known
    return ending(cause, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cause", "known", "code"),
    [
        (Cause.TRAINER, {"trainer_code": 0}, 0),
        (Cause.TRAINER, {"trainer_code": 3}, 3),
        (Cause.TRAINER, {"trainer_code": 137}, 137),
        (Cause.HUB_ENDED, {"hub_code": 1, "hub_text": "the generator failed for good"}, 1),
        (Cause.HUB_LOST, {"hub_code": 137}, 70),
        (Cause.HUB_LOST, {}, 70),
        (Cause.ENGINE_LOST, {"engine_text": "the engine died 4 times"}, 69),
        (Cause.INTERRUPTED, {"signum": signal.SIGINT}, 130),
        (Cause.INTERRUPTED, {"signum": signal.SIGTERM, "trainer_code": 1}, 143),
        (Cause.INTERRUPTED, {"signum": signal.SIGHUP}, 129),
    ],
)
def test_exit_code(cause: Cause, known: dict[str, object], code: int) -> None:
    plan = end(cause, **known)
    assert plan.exit_code == code  # type: ignore[attr-defined]
    assert plan.text  # type: ignore[attr-defined]


@pytest.mark.parametrize("cause", list(Cause))
def test_no_end_outlasts_the_grace(cause: Cause) -> None:
    plan = end(cause, trainer_code=1, hub_code=1, signum=signal.SIGINT)
    assert plan.patience_s + plan.grace_s <= 10.0  # type: ignore[attr-defined]


def test_a_lost_hub_ends_the_trainer_within_five_seconds() -> None:
    plan = end(Cause.HUB_LOST, hub_code=137, grace_s=60.0)
    assert plan.patience_s + plan.grace_s < 5.0  # type: ignore[attr-defined]


def test_the_codes_are_documented() -> None:
    assert {0, 1, 2, 69, 70, 130} == EXIT_CODES.keys()
