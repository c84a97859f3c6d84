"""A model's tokenizer, using only the `tokenizers` library: it loads ten times faster than `AutoTokenizer`.

In: a folder with `tokenizer.json` and related files. Out: prompt ids, decoded text, and the ids that end a
completion; equal to the results of `transformers` for the same folder.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from fa_rollout.config import ConfigError
from fa_rollout.data.chat import ChatTemplates, PromptError, read_json
from fa_rollout.data.row import Row
from fa_rollout.model_name import download, name_of

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
END_OF_MESSAGE = "<|eom_id|>"
"""SGLang also stops at this token if the tokenizer has it (Llama 3: the end of a tool call)."""


class Tokenizer:
    """Turns prompts into token ids and completions into text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, templates: ChatTemplates, eos_ids: tuple[int, ...]
    ) -> None:
        self._backend = backend
        self._templates = templates
        self.eos_ids = eos_ids
        """Token ids that end a completion, ascending."""
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, including added tokens; the model may have more rows."""

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a tokenizer's folder.

        Raises:
            ConfigError: the folder lacks `tokenizer.json`, or a file in it is broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            if name := name_of(str(folder)):
                raise ConfigError(
                    f"the tokenizer must be a local folder; {str(folder)!r} looks like a Hub name: "
                    f"{download(name)}, then pass that folder"
                )
            raise ConfigError(
                f"the tokenizer must be a folder with tokenizer.json, none in {folder}; create one with "
                "transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception for all errors in the file.
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be read by the installed tokenizers release: {error}"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        special = _special_tokens(folder, config)
        _add_tokens(backend, config, special)
        return cls(backend, ChatTemplates.load(folder, config, special), _eos_ids(folder, backend, special))

    def encode_prompt(self, row: Row, *, chat_template: bool | None = None) -> npt.NDArray[np.int32]:
        """Token ids of a row's prompt, [P].

        Messages are rendered by the chat template, which adds its own special tokens; text gets the special
        tokens of the tokenizer's post-processor. With `chat_template=True`, text becomes one user message.

        Raises:
            ConfigError: messages without a template, or with `chat_template=False`.
            PromptError: this prompt cannot be encoded.
        """
        prompt = row.prompt
        if isinstance(prompt, str) and not chat_template:
            return self._ids(prompt, add_special_tokens=True)
        if chat_template is False:
            raise ConfigError(
                "prompts that are chat messages need the chat template, found data.chat_template = false; "
                "remove it, or use text prompts"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self._templates.render(messages, row.tools, row.chat_template_kwargs)
        return self._ids(text, add_special_tokens=False)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Text of a chat, rendered by the chat template. Errors as in `ChatTemplates.render`."""
        return self._templates.render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt)

    @property
    def template_text(self) -> str:
        """Source of the chat templates; empty if there are none."""
        return self._templates.text

    def unused_by_template(self, names: Iterable[str]) -> list[str]:
        """The given variables that the chat template never mentions."""
        return self._templates.unused(names)

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of text such as tool output, [T], without added special tokens."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _ids(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # The library raises TypeError for text with lone surrogates.
        except TypeError as error:
            raise PromptError(f"a prompt must be valid Unicode text: {error}") from error
        if not ids:
            raise PromptError("a prompt must have at least one token, found none after encoding")
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, decoded in one call."""
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens)


def _text_of(token: Any) -> str | None:
    """The text of a special token, stored as text or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    older = read_json(folder / "special_tokens_map.json")
    texts = {name: _text_of(config.get(name, older.get(name))) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Add tokens that only the configuration names."""
    described = config.get("added_tokens_decoder", {})
    for key in sorted(described, key=int):
        entry = {name: value for name, value in described[key].items() if name != "__type"}
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([tokenizers.AddedToken(**entry)])
    missing = [text for text in special.values() if backend.token_to_id(text) is None]
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in missing])


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    """All end-of-sequence ids in the model's files: engines stop at each of them."""
    texts = [special[name] for name in ("eos_token",) if name in special]
    found = (backend.token_to_id(text) for text in [*texts, END_OF_MESSAGE])
    return tuple(sorted(model_eos_ids(folder).union(ident for ident in found if ident is not None)))


def model_eos_ids(folder: Path) -> set[int]:
    """The end-of-sequence ids in a model's files.

    Raises:
        ConfigError: a file is not JSON.
    """
    model = read_json(folder / "config.json")
    found: set[int | None] = set()
    for tree in (model, model.get("text_config") or {}, read_json(folder / "generation_config.json")):
        value = tree.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value])
    return {ident for ident in found if ident is not None}


def eos_ids_in(folder: str) -> set[int]:
    """`model_eos_ids` of a folder that may be on another machine; empty if it cannot be read."""
    try:
        return model_eos_ids(Path(folder).expanduser())
    except (ConfigError, OSError):
        return set()
