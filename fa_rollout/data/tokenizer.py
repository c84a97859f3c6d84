"""A model's tokenizer, on the `tokenizers` library alone: it loads in a tenth of the time of `AutoTokenizer`.

In: a folder with `tokenizer.json` and its companions. Out: prompt ids, decoded text, and which ids end a
completion; equal to what `transformers` makes of the same folder.
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
"""SGLang ends an answer at it too, where a tokenizer has it (Llama 3: the end of a tool call)."""


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
        """Number of tokens, added ones included; the model may have more rows than that."""

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
                    f"{download(name)}, then give that folder"
                )
            raise ConfigError(
                f"the tokenizer must be a folder with tokenizer.json, found none in {folder}; make one with "
                "transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception for whatever is wrong with the file.
        except Exception as error:
            raise ConfigError(
                f"{path} is not a tokenizer that this tokenizers release reads: {error}"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        special = _special_tokens(folder, config)
        _add_tokens(backend, config, special)
        return cls(backend, ChatTemplates.load(folder, config, special), _eos_ids(folder, backend, special))

    def encode_prompt(self, row: Row, *, chat_template: bool | None = None) -> npt.NDArray[np.int32]:
        """Token ids of a row's prompt, [P].

        Messages go through the chat template, which writes its own special tokens; text gets the special
        tokens of the tokenizer's post-processor. `chat_template=True` takes text as one message of the user.

        Raises:
            ConfigError: messages, and no template, or `chat_template=False`.
            PromptError: this prompt cannot be encoded.
        """
        prompt = row.prompt
        if isinstance(prompt, str) and not chat_template:
            return self._ids(prompt, add_special_tokens=True)
        if chat_template is False:
            raise ConfigError(
                "prompts that are chat messages need the chat template, found data.chat_template = false; "
                "leave it out, or give prompts as text"
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
        """Text of a chat by the chat template; errors as those of `ChatTemplates.render`."""
        return self._templates.render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt)

    @property
    def template_text(self) -> str:
        """Source of the chat templates; empty where there is none."""
        return self._templates.text

    def unused_by_template(self, names: Iterable[str]) -> list[str]:
        """Those of these variables that the chat template never mentions."""
        return self._templates.unused(names)

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids of a piece of text such as tool output, [T], without special tokens around it."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _ids(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # What the library calls a text that is no string is one with lone surrogates.
        except TypeError as error:
            raise PromptError(f"a prompt must be valid Unicode text: {error}") from error
        if not ids:
            raise PromptError("a prompt must have at least one token, found none after encoding")
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, decoded all at once."""
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens)


def _text_of(token: Any) -> str | None:
    """A special token is written as text, or as an object that describes it."""
    return token.get("content") if isinstance(token, dict) else token


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    older = read_json(folder / "special_tokens_map.json")
    texts = {name: _text_of(config.get(name, older.get(name))) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that only the configuration names."""
    described = config.get("added_tokens_decoder", {})
    for key in sorted(described, key=int):
        entry = {name: value for name, value in described[key].items() if name != "__type"}
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([tokenizers.AddedToken(**entry)])
    missing = [text for text in special.values() if backend.token_to_id(text) is None]
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in missing])


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    """Every id that one of the model's files calls an end: engines stop at each of them."""
    texts = [special[name] for name in ("eos_token",) if name in special]
    found = (backend.token_to_id(text) for text in [*texts, END_OF_MESSAGE])
    return tuple(sorted(model_eos_ids(folder).union(ident for ident in found if ident is not None)))


def model_eos_ids(folder: Path) -> set[int]:
    """What the files of a model call the end of an answer.

    Raises:
        ConfigError: one of them is not JSON.
    """
    model = read_json(folder / "config.json")
    found: set[int | None] = set()
    for tree in (model, model.get("text_config") or {}, read_json(folder / "generation_config.json")):
        value = tree.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value])
    return {ident for ident in found if ident is not None}


def eos_ids_in(folder: str) -> set[int]:
    """The same for a folder that may be of another machine; empty where it cannot be read."""
    try:
        return model_eos_ids(Path(folder).expanduser())
    except (ConfigError, OSError):
        return set()
