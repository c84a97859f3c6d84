"""The tokenizer of a checkpoint folder."""

from typing import Any

from fa_rollout.data.tokenizer import Tokenizer


class PlainTokenizer:
    def __init__(self, folder: str) -> None:
        self._tokenizer = Tokenizer.load(folder)
        self.eos_token_id = self._tokenizer.eos_ids[0]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def load_tokenizer(folder: str, **options: Any) -> PlainTokenizer:
    return PlainTokenizer(folder)
