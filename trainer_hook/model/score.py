"""How likely the trainer's own model finds a short text, for engines that cannot report their weights.

In: what was pushed. Out: a `Scored`, or nothing where this process cannot run the model by itself: its
weights are sharded, it is a mapping, or it is no causal language model of transformers.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer_hook.messages import Scored
from trainer_hook.model.parts import is_sharded, unwrapped

if TYPE_CHECKING:
    import torch

log = logging.getLogger("trainer_hook")

_NUM_TOKENS = 16
_FIRST, _STRIDE = 5, 7
"""Ids of the text: small ones are plain characters in most vocabularies, and few of them are special. SGLang
replaces the last id of a vocabulary by another."""


def score(source: Any) -> Scored | None:
    """Run the model once over a few tokens; it is left as it was."""
    import torch

    if not isinstance(source, torch.nn.Module):
        return None
    model = unwrapped(source)
    weights = list(model.parameters())
    if not _is_language_model(model) or any(is_sharded(w) or hasattr(w, "ds_id") for w in weights):
        return None
    ids = _text(model)
    try:
        with torch.no_grad(), _evaluating(model):
            tokens = torch.tensor([ids], device=weights[0].device)
            logits = model(input_ids=tokens, use_cache=False).logits[0].float()
    except Exception as error:  # whatever a model needs besides ids: its engines stay unchecked
        log.info("event=model_not_scored error=%s: %s", type(error).__name__, error)
        return None
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
    if not logprobs.isfinite().all():
        return None
    is_float32 = all(weight.dtype == torch.float32 for weight in weights)
    return Scored(input_ids=ids, logprobs=logprobs.tolist(), is_float32=is_float32)


def _is_language_model(model: "torch.nn.Module") -> bool:
    """Of transformers, with PEFT around it or not, whole in this process."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    return base is not None and isinstance(inner, base) and hasattr(inner, "lm_head")


def _text(model: "torch.nn.Module") -> list[int]:
    config: Any = model.config
    size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    return [(_FIRST + _STRIDE * place) % max(1, size // 2) for place in range(_NUM_TOKENS)]


@contextmanager
def _evaluating(model: "torch.nn.Module") -> Iterator[None]:
    """Without dropout; each module then trains, or does not, as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
