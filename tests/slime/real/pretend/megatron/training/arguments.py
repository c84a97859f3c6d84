"""A parser with the model's shape, in place of Megatron's; slime adds its own options to it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

_NUMBERS = {
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-attention-heads": 4,
    "kv-channels": 16,
    "vocab-size": 1000,
    "moe-router-topk": 2,
    "rotary-base": 10000,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
}
_OPEN = (
    "num-query-groups",
    "num-experts",
    "moe-ffn-hidden-size",
    "q-lora-rank",
    "kv-lora-rank",
    "expert-tensor-parallel-size",
    "ckpt-step",
    "seq-length",
    "max-position-embeddings",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
)
_TEXTS = ("tokenizer-type", "rope-type", "tokenizer-model")
_FLAGS = (
    "fp16",
    "bf16",
    "finetune",
    "no-load-optim",
    "no-load-rng",
    "no-save-optim",
    "untie-embeddings-and-output-weights",
    "multi-latent-attention",
    "sequence-parallel",
)


def parse_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
) -> Namespace:
    parser = ArgumentParser(allow_abbrev=False)
    for name in (*_NUMBERS, *_OPEN):
        parser.add_argument(f"--{name}", type=int, default=_NUMBERS.get(name))
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--norm-epsilon", type=float, default=1e-5)
    parser.set_defaults(moe_layer_freq=1)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


def validate_args(args: Namespace, *others: object) -> Namespace:
    return args
