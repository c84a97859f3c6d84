"""A peer's silence, on a clock of the test's own."""

from fa_rollout.launcher.children.heartbeat import Heartbeat


def test_a_peer_is_asked_once_a_second_and_only_when_it_has_answered() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.is_due(0.0)
    assert not heartbeat.is_due(5.0)
    heartbeat.answered()
    assert not heartbeat.is_due(0.5)
    assert heartbeat.is_due(6.0)


def test_silence_is_counted_from_the_question_and_ends_with_an_answer() -> None:
    heartbeat = Heartbeat()
    for look in range(9):
        heartbeat.is_due(0.5 * look)
    assert heartbeat.silent_s == 4.0
    heartbeat.answered()
    assert heartbeat.silent_s == 0.0


def test_time_in_which_nobody_looked_is_no_silence() -> None:
    heartbeat = Heartbeat()
    heartbeat.is_due(0.0)
    heartbeat.is_due(3600.0)
    assert heartbeat.silent_s <= 1.0
