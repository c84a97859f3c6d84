"""Sampling parameters of one request, as the engines name them. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from fa_rollout.config import Sampling
from trainer_hook.record import TokenSampling

Params = dict[str, Any]

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters that constrain an answer to a grammar from its first token on."""
_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Penalties that depend on the request's sampled tokens, and their neutral values."""


def base_params(sampling: Sampling) -> Params:
    """A new dict of parameters for one sample, which user code may change."""
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

    `serial` counts the sample's requests, so that continuations and later turns do not reuse random
    numbers.
    """
    text = f"{seed}/{group}/{member}/{attempt}/{serial}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def texts_of(params: Params, name: str) -> list[str]:
    """The texts of `stop` or `stop_regex`, which may be one text or a list."""
    given = params.get(name) or []
    return [text for text in ([given] if isinstance(given, str) else given) if text]


def has_grammar(params: Params) -> bool:
    """Whether a grammar constrains the answer."""
    return any(params.get(name) for name in _GRAMMARS)


def can_be_continued(params: Params, options: Mapping[str, Any]) -> bool:
    """Whether an engine can continue an answer whose tokens are sent as the end of a prompt.

    A grammar would start again, penalties would not count these tokens, and a logit processor would not see
    them as output: the rest would be sampled from another distribution. All other parameters keep their
    meaning: budgets are reduced by the existing tokens, and a seed depends on the position in the sequence.
    """
    is_free = all(params.get(name) in (None, neutral) for name, neutral in _PENALTIES.items())
    return is_free and not has_grammar(params) and not options.get("custom_logit_processor")


def refusal(params: Params) -> str | None:
    """Why a request with these parameters is refused; None if it is not."""
    for name in ("n", "beam_width"):
        if params.get(name) not in (None, 1):
            return (
                f"{name}: a request must ask for one answer, found {name} = {params[name]!r}; send it again"
            )
    return None


def continuation_params(params: Params, *, num_done: int) -> Params:
    """Parameters for the rest of a turn that already has `num_done` tokens."""
    rest = params | {"max_new_tokens": params["max_new_tokens"] - num_done}
    if rest.get("min_new_tokens"):
        rest["min_new_tokens"] = min(max(0, rest["min_new_tokens"] - num_done), rest["max_new_tokens"])
    return rest
