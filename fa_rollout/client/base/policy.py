"""The failure policy: one frozen object, and the pure decisions made from it."""

from dataclasses import dataclass

from fa_rollout.client.base.errors import FailureClass

KEY_STATUSES = (401, 403)
"""An engine wants another key."""
_MOST_DOUBLINGS = 3
"""An engine that works again must not stand idle for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Every deadline, limit and pause of the engine client."""

    max_attempts: int = 4
    """Requests sent for one sample, those aside that met a condition of the server: overload, a server error,
    a lost connection."""
    request_timeout_s: float = 600.0
    """Longest wait for one answer; time in which engines stand paused does not count."""
    connect_timeout_s: float = 10.0
    start_timeout_s: float = 300.0
    """Longest wait for an engine to come up at the start."""
    unavailable_timeout_s: float = 120.0
    """Longest wait for any engine to answer when none does, or for one sample that none answers."""
    control_timeout_s: float = 30.0
    """Longest wait for a control call, a pause or an update aside."""
    control_try_s: float = 5.0
    """First wait for the answer to a quick control call, which is then repeated with longer waits."""
    refusal_patience_s: float = 10.0
    """Longest repetition of a control call that an engine refuses with a server error."""
    pause_timeout_s: float = 120.0
    update_timeout_s: float = 600.0
    abort_grace_s: float = 10.0
    """Time for an aborted request to come back by itself; then its connection is closed."""
    foreign_pause_s: float = 900.0
    """Longest pause by somebody else that a request sits out."""
    backoff_base_s: float = 0.5
    """Before retry k a request waits a random share of base * 2**k seconds, k being 3 at most."""
    overload_base_s: float = 2.0
    """The same for an engine that is overloaded."""
    backoff_cap_s: float = 30.0
    """Longest back-off, also where a server asks for more by Retry-After."""
    circuit_failures: int = 5
    """Transient failures in a row after which an engine gets no more requests until a probe succeeds."""
    max_untrue: int = 3
    """Untrue answers in a row after which an engine gets no more requests, as long as another is left."""
    untrue_rest_s: float = 10.0
    """For so long, and twice as long each time that it happens again."""
    probe_interval_s: float = 1.0
    """Between recovery probes; grows to ten times as much."""


def classify_status(status: int) -> FailureClass:
    """The class of an HTTP status that is not 200."""
    if status in (429, 503):
        return FailureClass.OVERLOAD
    if status >= 500 or status == 408:
        return FailureClass.TRANSIENT
    # A redirect, or a key that this engine alone does not take, says nothing of the request.
    if status < 400 or status in KEY_STATUSES:
        return FailureClass.INVALID
    return FailureClass.PERMANENT


def backoff_s(policy: FailurePolicy, failure: FailureClass, attempt: int, share: float) -> float:
    """Seconds to wait after failed attempt number `attempt` (1 is the first); `share` is random in [0, 1).

    Full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    base = policy.overload_base_s if failure is FailureClass.OVERLOAD else policy.backoff_base_s
    return share * min(policy.backoff_cap_s, base * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS))
