"""Whether a request is sent again, and when.

| a request ends in | it is sent again | until |
|---|---|---|
| a condition of the server: overload, a server error, a lost connection | after a back-off | patience ends |
| silence to its deadline | after a back-off | `max_attempts` |
| an untrue answer | at once, to an engine that has not lied to it; to the only one once | `max_attempts` |
| an untrue answer behind a router | at once: the router may pick another worker | `max_attempts` |
| an untrue answer while every engine that has not lied to it is away | after a back-off | patience ends |
| a refusal of this very request | no | |

Invariant: what says nothing of the request spends nothing but time.
"""

import random
from dataclasses import dataclass

from fa_rollout.client.base.clock import ActiveClock
from fa_rollout.client.base.errors import (
    FailureClass,
    InvalidReply,
    RequestFailed,
    RequestRefused,
    RequestTimedOut,
)
from fa_rollout.client.base.patience import Blame, Patience, Trouble
from fa_rollout.client.base.policy import FailurePolicy, backoff_s
from fa_rollout.client.engine.endpoints import HttpFailure
from fa_rollout.client.fleet.dispatch import Lane, LaneDispatcher
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.requests.call import Call

_SUSPECT = 500
"""The status that a server's own fault and a request that breaks it have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """The decisions of a pool."""

    policy: FailurePolicy
    clock: ActiveClock
    patience: Patience
    """With conditions of the servers."""
    dispatcher: LaneDispatcher
    recovery: Recovery
    is_router: bool
    """Requests go through a router, which picks a worker anew for each try."""

    def delay_s(self, call: Call, lane: Lane, failure: HttpFailure) -> float:
        """Seconds before the next try.

        Raises:
            RequestFailed, EngineUnavailable: there is none.
        """
        call.num_failures += 1
        call.avoid = lane
        text = f"request {call.rid} failed at {lane.url} on attempt {call.num_failures}: {failure}"
        kind = failure.failure
        if kind is FailureClass.PERMANENT:
            raise RequestRefused(text) from failure
        if kind is FailureClass.INVALID:
            call.liars |= {lane}
            if failure.status is None and self.dispatcher.are_others_away(call.liars):
                call.trouble = self.bear(call.trouble, text)
                return backoff_s(self.policy, kind, call.num_failures, random.random())
            self._try_elsewhere(call, failure, text)
            return 0.0
        if kind is FailureClass.SILENCE:
            call.num_silent += 1
            if call.trouble is not None:
                call.trouble.end()  # its time counts: this one did not ask for another try
            if call.num_silent >= self.policy.max_attempts:
                raise RequestTimedOut(text) from failure
            return backoff_s(self.policy, kind, call.num_silent, random.random())
        is_suspect = failure.status == _SUSPECT
        call.trouble = self.bear(call.trouble, text, is_suspect=is_suspect)
        delay_s = backoff_s(self.policy, kind, call.num_failures, random.random())
        if self.dispatcher.others(frozenset({lane})):
            return delay_s  # the engine that asked to be left alone is, by its window
        return max(delay_s, self.asked_for_s(failure))

    def _try_elsewhere(self, call: Call, failure: HttpFailure, text: str) -> None:
        """Raise unless an untrue answer is worth another try."""
        call.num_untrue += 1
        has_other = self.is_router or bool(self.dispatcher.others(call.liars))
        # What is refused by its status alone would be so again by the same engine.
        is_worth_it = has_other or (call.num_untrue == 1 and failure.status is None)
        if not is_worth_it or call.num_untrue >= self.policy.max_attempts:
            kind = InvalidReply if failure.status is None else RequestRefused
            raise kind(text) from failure

    def bear(self, trouble: Trouble | None, text: str, *, is_suspect: bool = False) -> Trouble:
        """What a request has met by now, one more failure included that is not its own.

        Raises:
            EngineUnavailable, RequestFailed: that has been borne for too long.
        """
        now_s = self.clock.now()
        trouble = self.patience.met(trouble, now_s)
        blame = self.patience.blame(trouble, now_s, is_suspect=is_suspect)
        if blame is Blame.SERVER:
            raise self.recovery.unavailable(text)
        if blame is Blame.REQUEST:
            raise RequestFailed(f"{text}; others were answered meanwhile")
        return trouble

    def asked_for_s(self, failure: HttpFailure) -> float:
        """How long the server asked to be left alone, within reason."""
        return min(failure.retry_after_s, self.policy.backoff_cap_s)
