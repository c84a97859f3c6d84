"""The model, and its two passes: prefill of new rows and one decode step of all rows.

In go requests whose place in `running` is their row of the KV cache; out come the float32 logits of each
one's next token. Every pass equals a forward pass of the whole sequence; the start-up check refuses a model
for which that is not so.

Shapes: N requests, U distinct token sequences, T padded length, V vocabulary, E hidden width.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fa_rollout.engines.embedded.errors import UnsupportedModel
from fa_rollout.engines.embedded.model.kv_cache import KVCache
from fa_rollout.engines.embedded.model.request import GenerationRequest
from fa_rollout.engines.embedded.model.sampler import top_entries

_ATTENTION = "fa_rollout_grouped"
_CHECK_TOLERANCE = 1e-3


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that never copies keys and values out of the cache.

    In a decode step the query heads of one key-value head take the place of query positions.
    """
    num_rows, num_heads, length, width = query.shape
    num_kv_heads = key.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention
    if length == 1:
        grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, width)
        out = attend(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(num_rows, 1, num_heads, value.shape[-1]), None
    is_causal = attention_mask is None
    out = attend(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _grouped_attention)


def _load(model_path: Path) -> Any:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        model_path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(False)


class Runner:
    """A causal language model with the KV cache of its running requests."""

    def __init__(self, model_path: Path) -> None:
        self.model = _load(model_path)
        config = self.model.config
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.cache = KVCache(
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )
        self._body = self.model.base_model
        self._head = self.model.get_output_embeddings()
        # transformers 5 renamed `past_key_values`
        parameters = inspect.signature(self._body.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._check_exact()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence id that the model's configurations name."""
        ids: set[int] = set()
        for config in (self.model.config, self.model.generation_config):
            eos = getattr(config, "eos_token_id", None)
            ids.update([eos] if isinstance(eos, int) else eos or [])
        return frozenset(ids)

    @torch.inference_mode()
    def prefill(self, requests: Sequence[GenerationRequest], *, first_row: int) -> torch.Tensor:
        """Compute the rows from `first_row` on; logits [N, V] of each request's next token.

        Equal sequences, as the samples of one prompt, are computed once.
        """
        index_of: dict[tuple[int, ...], int] = {}
        sources = []
        for request in requests:
            sequence = (*request.prompt_ids, *request.output_ids)
            if sequence in index_of:
                # As in SGLang, whose last prompt token is always computed
                request.num_cached_tokens = len(sequence) - 1
            sources.append(index_of.setdefault(sequence, len(index_of)))
        is_shared = len(index_of) < len(requests)
        self.cache.begin_prefill(first_row, torch.tensor(sources) if is_shared else None)
        hidden_UTE, lengths_U = self._forward_padded(list(index_of))
        last_UE = hidden_UTE[torch.arange(len(index_of)), lengths_U - 1]
        for request, source in zip(requests, sources, strict=True):
            if request.logprob_start is not None and request.input_logprobs is None:
                self._score_prompt(request, hidden_UTE[source])
        logits_UV = self._head(last_UE)
        logits_NV: torch.Tensor = logits_UV[sources] if is_shared else logits_UV
        return logits_NV

    @torch.inference_mode()
    def decode(self, requests: Sequence[GenerationRequest]) -> torch.Tensor:
        """Feed each request's newest token to its row; logits [N, V] of the next one."""
        positions_N = torch.tensor([request.num_tokens - 1 for request in requests])
        tokens_N1 = torch.tensor([[request.output_ids[-1]] for request in requests])
        num_columns = int(positions_N.max()) + 1
        mask_N11C = (torch.arange(num_columns) <= positions_N[:, None])[:, None, None]
        self.cache.begin_decode(positions_N, num_columns)
        hidden_N1E = self._forward(tokens_N1, positions_N[:, None], mask_N11C)
        logits_NV: torch.Tensor = self._head(hidden_N1E[:, 0])
        return logits_NV

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        output = self._body(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: self.cache},
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _forward_padded(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Padding is on the right, where causal attention never looks."""
        lengths = [len(sequence) for sequence in sequences]
        tokens_UT = np.zeros((len(sequences), max(lengths)), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            tokens_UT[row, : len(sequence)] = sequence
        positions_1T = torch.arange(max(lengths))[None]
        hidden_UTE = self._forward(torch.from_numpy(tokens_UT), positions_1T, None)
        return hidden_UTE, torch.tensor(lengths)

    def _score_prompt(self, request: GenerationRequest, hidden_TE: torch.Tensor) -> None:
        """Log-probs of prompt tokens, at temperature 1 whatever the request's own, as in SGLang."""
        start, end = request.logprob_start or 0, len(request.prompt_ids) - 1
        targets = torch.tensor(request.prompt_ids[start + 1 :], dtype=torch.int64)
        request.input_logprobs = []
        for first in range(start, end, 256):
            last = min(first + 256, end)
            logprobs = torch.log_softmax(self._head(hidden_TE[first:last]), dim=-1)
            chosen = logprobs.gather(1, targets[first - start : last - start, None])[:, 0]
            request.input_logprobs.extend(chosen.tolist())
            request.input_top.extend(top_entries(logprobs, [request.num_top] * len(logprobs)) or [])

    @torch.inference_mode()
    def _check_exact(self) -> None:
        """Compare this file's passes with the model's own forward pass on two short sequences."""
        ids = [[token % self.vocab_size for token in tokens] for tokens in ([5, 3, 7, 2, 11], [9, 4, 1])]
        expected = torch.stack([self.model(torch.tensor([tokens])).logits[0, -1] for tokens in ids])
        self.model.set_attn_implementation(_ATTENTION)
        self.cache.reserve(len(ids), 64, used=(0, 0))
        self.cache.begin_prefill(0, None)
        self._forward_padded([tokens[:-1] for tokens in ids])
        positions_N = torch.tensor([len(tokens) - 1 for tokens in ids])
        self.cache.begin_decode(positions_N, 5)
        mask_N11C = (torch.arange(5) <= positions_N[:, None])[:, None, None]
        last_N1 = torch.tensor([[tokens[-1]] for tokens in ids])
        found = self._head(self._forward(last_N1, positions_N[:, None], mask_N11C)[:, 0])
        error = (torch.log_softmax(found, -1) - torch.log_softmax(expected, -1)).abs().max().item()
        if not error <= _CHECK_TOLERANCE:
            raise UnsupportedModel(
                f"a model's log-probs under the embedded engine must equal its own forward pass; for "
                f"{type(self.model).__name__} they differ by {error:.2g}. Use a Llama, Qwen2 or Qwen3 model "
                f"with full attention, or SGLang."
            )
