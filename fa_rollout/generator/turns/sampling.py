"""Sampling parameters of one request, as the engines name them. Pure."""

import hashlib
from typing import Any

import msgspec

from fa_rollout.config import Sampling
from trainer_hook.record import TokenSampling

Params = dict[str, Any]

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters that hold an answer, from its first token on, to a form."""


def base_params(sampling: Sampling) -> Params:
    """A fresh dict for one sample: user code may change it without touching another's."""
    params: Params = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    return params


def token_sampling(params: Params) -> TokenSampling:
    """How the tokens of a request with these parameters are sampled."""
    told = msgspec.structs.asdict(TokenSampling())
    told |= {name: params[name] for name in told if params.get(name) is not None}
    top_k = int(told.pop("top_k"))
    return TokenSampling(top_k=top_k, **{name: float(value) for name, value in told.items()})


def sample_seed(seed: int, *, group: int, member: int, attempt: int, serial: int) -> int:
    """Seed in [0, 2**63) of one request; the same on every machine and in every run.

    `serial` counts the requests of the sample, so that a continuation or a further turn does not draw its
    predecessor's random numbers again.
    """
    text = f"{seed}/{group}/{member}/{attempt}/{serial}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stop_texts(params: Params) -> list[str]:
    """Engines take one stop text too, where others take a list."""
    stops = params.get("stop") or []
    return [text for text in ([stops] if isinstance(stops, str) else stops) if text]


def can_be_continued(params: Params) -> bool:
    """Whether an engine can go on with an answer's tokens as its prompt: it would begin a grammar anew."""
    return not any(params.get(name) for name in _GRAMMARS)


def continuation_params(params: Params, *, num_done: int) -> Params:
    """Parameters for what is left of a turn that has `num_done` tokens already."""
    rest = params | {"max_new_tokens": params["max_new_tokens"] - num_done}
    if num_done and rest.get("min_new_tokens"):
        rest["min_new_tokens"] = max(0, rest["min_new_tokens"] - num_done)
    return rest
