"""The tokenizer of a checkpoint folder."""

from typing import Any

from fa_rollout.data.tokenizer import Tokenizer


class PlainTokenizer:
    def __init__(self, folder: str) -> None:
        self._tokenizer = Tokenizer.load(folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def load_tokenizer(folder: str, **options: Any) -> PlainTokenizer:
    return PlainTokenizer(folder)
