"""A small Llama with random weights and a tokenizer of single characters, written as a model folder.

For tests and the demo: it starts in a second, and learns easy tasks in minutes. Needs neither torch nor
transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = range(3)
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
INITIAL_STD = 0.02


def write_tiny_model(
    folder: str | Path,
    *,
    characters: str,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    key_value_heads: int | None = None,
    seed: int = 0,
    context: int = 256,
    std: float = INITIAL_STD,
) -> Path:
    """Write configuration, weights and tokenizer to `folder`; token ids are 3 + the character's place.

    `std` is that of the random weights: larger ones make the model sure of its nonsense.
    """
    if len(set(characters)) < len(characters):
        raise ValueError(f"characters must differ from each other, got {characters!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(
        vocab_size=len(SPECIAL_TOKENS) + len(characters),
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=key_value_heads or heads,
        context=context,
    )
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", generation)
    save_file(_weights(config, seed, std), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(characters).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(context))
    return folder


def _config(
    *, vocab_size: int, hidden: int, layers: int, heads: int, key_value_heads: int, context: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "initializer_range": INITIAL_STD,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _weights(
    config: dict[str, Any], seed: int, std: float
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Normal weights and unit norms, as transformers initialises Llama."""
    generator = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width, kv_width = hidden, config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (width, hidden),
                "self_attn.k_proj": (kv_width, hidden),
                "self_attn.v_proj": (kv_width, hidden),
                "self_attn.o_proj": (hidden, width),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else generator.normal(0.0, std, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _tokenizer(characters: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
