"""What a scripted engine is told to do: its speed, the lengths of answers, its protocol's age, its faults."""

from typing import Any, Literal

import msgspec

ADMIN_PREFIX = "/_scripted/"
"""Paths of the handle's own calls."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens answers have, before `max_new_tokens` cuts them."""

    kind: Literal["fixed", "uniform", "lognormal", "list"] = "fixed"
    tokens: int = 64
    """fixed: every answer; lognormal: the median."""
    sigma: float = 0.8
    """lognormal: standard deviation of the logarithm."""
    low: int = 1
    high: int = 1 << 20
    """uniform: low to high, both included; lognormal: clipped to them."""
    values: list[int] = []
    """list: one after the other, from the start again at the end."""
    path: str | None = None
    """list: a file of whole numbers, one a line, in place of `values`."""
    seed: int = 0


Damage = Literal[
    "null",
    "nan",
    "-inf",
    "positive",
    "zero",
    "negative_zero",
    "short",
    "absent",
    "ids",
    "no_version",
    "unfinished",
]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: which requests it meets, how often, and what happens to them."""

    path: str = "/generate"
    rid: str | None = None
    """Meets requests whose id contains this text."""
    prompt_start: list[int] | None = None
    """Meets requests whose input ids begin with these."""
    skip: int = 0
    """Matching requests let by before the first one is met."""
    every: int = 1
    """Then every k-th matching request is met."""
    times: int | None = None
    """How many requests are met in all; None: no end."""
    delay_s: float = 0.0
    """Wait so long, then do the rest."""
    status: int | None = None
    """Answer with this HTTP status and `body`."""
    body: str | None = None
    """Text of the answer; with no `status`, under 200."""
    retry_after_s: int | None = None
    """Sent in the header `Retry-After` of that answer."""
    location: str | None = None
    """Sent in its header `Location`: with a status such as 307, a redirect."""
    gzip_bytes: int | None = None
    """Answer with gzip, which nobody asked for, of a body of so many spaces."""
    endless: bool = False
    """Answer with spaces, without end."""
    drop: Literal["before", "middle"] | None = None
    """Cut the connection, without a byte or after half of the answer."""
    silent: bool = False
    """Never answer."""
    is_done: bool = False
    """A control call is carried out all the same; only its answer is as said above."""
    abort_after: int | None = None
    """The engine aborts the request by itself after so many tokens; at 0 without log-probability keys."""
    finish: dict[str, Any] | None = None
    """The finish reason that is told, such as an abort with `status_code`, `err_type` and `message`."""
    meta: dict[str, Any] | None = None
    """Fields of meta_info that are told in place of the true ones, `id` among them."""
    lacks: list[str] = []
    """Fields that meta_info does not have."""
    last_id: int | None = None
    """Told in place of the last token id, in both lists."""
    corrupt: Damage | None = None
    """Damage the log-probabilities, or another field, of the answer."""
    exit_code: int | None = None
    """The engine's process ends at once."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A whole scripted engine."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    protocol: Literal["0.5.15", "0.5.23"] = "0.5.23"
    """SGLang's release whose ways it has."""
    vocab_size: int = 32000
    context_length: int = 1 << 20
    experts: tuple[int, int] | None = None
    """(layers, experts of a token) of a model that routes; told when a request asks for them."""
    model_path: str = "scripted"
    tokenizer_path: str | None = None
    """None: the first `model_path`."""
    weight_version: str = "default"
    lengths: Lengths = Lengths()
    max_running: int = 1 << 20
    max_queued: int | None = None
    """Beyond it new requests get 503."""
    tokens_per_s: float = 0.0
    """Of one request; 0: answers come at once."""
    total_tokens_per_s: float = 0.0
    """Of all running requests together; 0: no limit."""
    prefill_s: float = 0.0
    """From the start of a request to its first token."""
    update_s: float = 0.0
    """How long loading weights takes."""
    health_timeout_s: float = 20.0
    """How long /health of a paused engine is silent before its 503."""
    idle_timeout_s: float = 0.0
    """Connections idle for so long are dropped; 0: never."""
    disconnect_abort_s: float = 4.0
    """From the loss of a client to the end of its request."""
    die_on_bad_ids: bool = True
    """Ids outside of the vocabulary end the process, as on SGLang's CPU backend; else they get 400."""
    rules: list[Rule] = []
    journal: str | None = None
    """File to which the engine adds every answer, as it was before a fault changed it."""
    workers: list[str] = []
    """Addresses: this is a router to them, and only `host`, `port`, `rules` and `router_*` have a meaning."""
    router_retries: int = 0
    """Times a router tries again by itself, under the same request id."""
    router_drops: bool = True
    """A router leaves out the keys of a request that it does not know, as sglang-router 0.3.2 does; the build
    of it that slime's image has passes them on."""
    router_health_s: float = 0.2
    """Between a router's looks at its workers' health; 0: it never looks."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One request that came in."""

    time_s: float
    """time.monotonic() of the server; one clock for all processes of a host."""
    method: str
    path: str
    rid: str | None
    num_input_ids: int
    input_ids_start: list[int]
    routing_key: str | None
    body: dict[str, Any]
    """The JSON body without `input_ids`."""
