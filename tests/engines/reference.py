"""Models of a test, and what transformers makes of them: the reference that engines are held to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fa_rollout.engines.tiny_model import write_tiny_model

CHARACTERS = "0123456789+-*= abcdefgh"
VOCAB_SIZE = 3 + len(CHARACTERS)


def make_model(folder: Path, *, seed: int = 0, context: int = 4096) -> Path:
    """Sure enough of its next tokens that models of two seeds differ clearly; grouped key-value heads."""
    return write_tiny_model(
        folder, characters=CHARACTERS, seed=seed, context=context, key_value_heads=2, std=0.15
    )


def load_reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logprobs_RV(
    model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Of every token at each position of `output` after `prompt`, by one forward pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


def reference_logprobs(
    model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Of the tokens of `output` after `prompt`."""
    chosen = torch.tensor(output)[:, None]
    return logprobs_RV(model, prompt, output, temperature).gather(1, chosen)[:, 0].tolist()
