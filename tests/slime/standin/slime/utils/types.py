"""The sample, with the attributes that conversion, metrics and plug-ins read."""

import base64
import os
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


def decoded(text: str) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text)), np.int32)


@dataclass
class Sample:
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Tokens and what belongs to them grow together; the answer's meta data sets status and version."""
        tokens = [int(token) for token in tokens or []]
        if text is not None:
            self.response += text
        if tokens:
            before = self.response_length
            self.tokens += tokens
            self.response_length += len(tokens)
            self.loss_mask = (self.loss_mask or [1] * before) + [int(trainable)] * len(tokens)
            values = [float(p) for p in log_probs] if log_probs is not None else [0.0] * len(tokens)
            self.rollout_log_probs = (self.rollout_log_probs or [0.0] * before) + values
        self._take_replays(args, meta_info or {}, len(tokens))
        if meta_info and "finish_reason" in meta_info:
            self.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens", 0)
            self.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens", 0)
            if "weight_version" in meta_info:
                self.weight_versions.append(meta_info["weight_version"])
            kinds = {"length": "TRUNCATED", "abort": "ABORTED", "stop": "COMPLETED"}
            self.status = Sample.Status[kinds[meta_info["finish_reason"]["type"]]]
        for values in (self.loss_mask, self.rollout_log_probs):
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{len(values)} entries for {self.response_length} response tokens")

    def _take_replays(self, args: Any, meta_info: dict[str, Any], num_tokens: int) -> None:
        """Kept ids belong to the tokens that they come with, routed experts to all tokens but the last."""
        if "top_p_token_ids" in meta_info:
            ids, offsets = (decoded(meta_info[f"top_p_token_{name}"]) for name in ("ids", "offsets"))
            if len(offsets) != num_tokens + 1:
                raise ValueError(f"{len(offsets)} offsets of kept ids for {num_tokens} tokens")
            before = (
                np.array([0]) if self.rollout_top_p_token_ids is None else self.rollout_top_p_token_offsets
            )
            kept = [] if self.rollout_top_p_token_ids is None else self.rollout_top_p_token_ids
            self.rollout_top_p_token_ids = np.concatenate([kept, ids]).astype(np.int32)
            self.rollout_top_p_token_offsets = np.concatenate([before, offsets[1:] + before[-1]])
        if "routed_experts" in meta_info:
            shape = (len(self.tokens) - 1, args.num_layers, args.moe_router_topk)
            self.rollout_routed_experts = decoded(meta_info["routed_experts"]).reshape(shape)


# A test may want slime to take as long to import as the real one does.
time.sleep(float(os.environ.get("STANDIN_IMPORT_S", "0")))
