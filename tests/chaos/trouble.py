"""What ails an engine for a while: overload, lost connections, untrue answers, control calls that fail.

Each is a list of rules of the scripted engine. None can lead to a token that was not sampled: an answer that
is changed is changed so that it can be found out.
"""

from typing import Any

from tests.chaos.job import VOCAB_SIZE
from tests.kit.scripted import Rule

_HTML = "<html><body><h1>502 Bad Gateway</h1></body></html>"
_BUSY = '{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}'


def _verdict(status: int, message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


OVERLOADS: dict[str, list[Rule]] = {
    "429": [Rule(status=429, body="slow down")],
    "429 with Retry-After": [Rule(status=429, body="slow down", retry_after_s=1)],
    "503": [Rule(status=503, body=_BUSY)],
    "500 in turns": [Rule(status=500, body="oops", every=2)],
    "502": [Rule(status=502, body=_HTML)],
    "429 inside a 200": [Rule(finish=_verdict(429, "too many requests"), abort_after=0)],
    "503 inside a 200": [Rule(finish=_verdict(503, "queue is full"), abort_after=0, every=2)],
    "500 inside a 200": [Rule(finish=_verdict(500, "CUDA error"), abort_after=3, every=2)],
}
OUTAGES: dict[str, list[Rule]] = {
    "resets": [Rule(drop="before", every=2)],
    "cut answers": [Rule(drop="middle", every=2)],
    "silence": [Rule(silent=True, every=3, times=4)],
    "slow": [Rule(delay_s=2.0, every=2)],
    "aborts": [Rule(abort_after=5, every=2)],
    "aborts at once": [Rule(abort_after=0, every=2)],
}
LIES: dict[str, list[Rule]] = {
    "an error in a 200": [Rule(body='{"error":{"message":"internal"}}', every=2)],
    "an empty body": [Rule(body="", every=2)],
    "HTML": [Rule(body=_HTML, every=2)],
    "half a body": [Rule(body='{"text":"so", "output_ids":[3,', every=2)],
    "another's id": [Rule(meta={"id": "stranger"}, every=2)],
    "ids beyond the vocabulary": [Rule(last_id=VOCAB_SIZE + 7, every=2)],
    "ids beyond 32 bits": [Rule(last_id=(1 << 32) + 5, every=2)],
    "another prompt's length": [Rule(meta={"prompt_tokens": 1}, every=2)],
    "log-probabilities NaN": [Rule(corrupt="nan", every=2)],
    "log-probabilities short": [Rule(corrupt="short", every=2)],
    "log-probabilities of other ids": [Rule(corrupt="ids", every=2)],
    "no finish": [Rule(corrupt="unfinished", every=2)],
}
CONTROL: dict[str, list[Rule]] = {
    "continue refused": [Rule(path="/continue_generation", status=500, body="no", times=1)],
    "continue without an answer": [Rule(path="/continue_generation", silent=True, is_done=True, times=1)],
    "continue lost": [Rule(path="/continue_generation", drop="before", times=1)],
    "pause refused": [Rule(path="/pause_generation", status=500, body="no", times=1)],
    "pause done and lost": [Rule(path="/pause_generation", drop="before", is_done=True, times=1)],
    "update refused": [
        Rule(path="/update_weights_from_disk", status=400, body='{"success":false}', times=1),
        Rule(path="/update_weights_from_tensor", status=400, body='{"success":false}', times=1),
    ],
    "update done and lost": [
        Rule(path="/update_weights_from_disk", drop="before", is_done=True, times=1),
        Rule(path="/update_weights_from_tensor", drop="before", is_done=True, times=1),
    ],
    "label refused": [Rule(path="/update_weight_version", status=500, body="no", times=1)],
    "death in an update": [
        Rule(path="/update_weights_from_disk", exit_code=1, times=1),
        Rule(path="/update_weights_from_tensor", exit_code=1, times=1),
    ],
    "abort refused": [Rule(path="/abort_request", status=500, body="no", times=3)],
}
KINDS = {"overload": OVERLOADS, "outage": OUTAGES, "lie": LIES, "control": CONTROL}
