"""Text that grows token by token.

A token's text depends on its neighbours (spaces, characters of several bytes), so each step decodes a short
window twice: without and with the new token. Text that ends in an incomplete character is held back.
"""

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""An incomplete character has at most four bytes; more is a model that writes broken text."""


class IncrementalText:
    """The decoding of one completion so far."""

    __slots__ = ("_ids", "_num_context", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_context = 0

    def push(self, token_id: int) -> str:
        """Take the next token; the text that it adds, maybe none."""
        self._ids.append(token_id)
        before = self._decode(self._ids[: self._num_context])
        after = self._decode(self._ids)
        num_held = len(self._ids) - self._num_context
        if after.endswith(_REPLACEMENT) and num_held < _MAX_HELD_TOKENS:
            return ""
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return text
