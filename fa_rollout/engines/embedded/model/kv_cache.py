"""Keys and values of all running requests: one padded tensor a layer, one row a request.

The rows in use are always 0 .. N-1 and a row's tokens start at column 0, so a decode step works on plain
slices. A request that leaves gives its row to the last one. What lies beyond a row's length is finite
(zeros, or tokens of an earlier request): it is masked, and a masked NaN would still poison the sum.

Shapes: R rows, H key-value heads, C columns, D head width; N rows in use, P prompt columns.
"""

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache


class KVCache(Cache):
    """The `cache` that transformers' attention layers write to and read from."""

    def __init__(self, *, num_layers: int, num_heads: int, head_dim: int) -> None:
        super().__init__(layers=[])
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._keys = [self._empty(0, 0) for _ in range(num_layers)]
        self._values = [self._empty(0, 0) for _ in range(num_layers)]
        self._first_row = 0
        self._sources_N: torch.Tensor | None = None
        self._rows_N: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self._columns_N: torch.Tensor | None = None
        self._num_columns = 0

    @property
    def bytes_per_token(self) -> int:
        return 2 * len(self._keys) * self._num_heads * self._head_dim * 4

    @property
    def capacity(self) -> tuple[int, int]:
        """(rows, columns) that are reserved."""
        return self._keys[0].shape[0], self._keys[0].shape[2]

    def reserve(self, num_rows: int, num_columns: int, *, used: tuple[int, int]) -> None:
        """Make room for `num_rows` rows of `num_columns` tokens; the `used` (rows, columns) are kept."""
        rows, columns = self.capacity
        if num_rows <= rows and num_columns <= columns:
            return
        # Sized by what is needed now, not by the largest ever seen in either direction
        num_rows = 1 << (num_rows - 1).bit_length()
        num_columns = 64 * -(-num_columns // 64)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(num_rows, num_columns)
                tensors[layer][: used[0], :, : used[1]] = old[: used[0], :, : used[1]]

    def release(self) -> None:
        """Give the memory back; no row may be in use."""
        self._keys = [self._empty(0, 0) for _ in self._keys]
        self._values = [self._empty(0, 0) for _ in self._values]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a row's first `num_tokens` tokens over another row."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def clear(self, row: int) -> None:
        """Zero a row that may hold numbers that are not finite."""
        for tensor in (*self._keys, *self._values):
            tensor[row] = 0.0

    def begin_prefill(self, first_row: int, sources_N: torch.Tensor | None) -> None:
        """The next forward pass computes new rows; `sources_N` says which of its rows each of them copies."""
        self._columns_N = None
        self._first_row = first_row
        self._sources_N = sources_N

    def begin_decode(self, columns_N: torch.Tensor, num_columns: int) -> None:
        """The next forward pass adds one token to each of the first N rows, at `columns_N`."""
        self._columns_N = columns_N
        self._rows_N = torch.arange(len(columns_N))
        self._num_columns = num_columns

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values; return those that its attention reads."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._columns_N is None:
            self._store_rows(keys, key_states)
            self._store_rows(values, value_states)
            return key_states, value_states
        keys[self._rows_N, :, self._columns_N] = key_states[:, :, 0]
        values[self._rows_N, :, self._columns_N] = value_states[:, :, 0]
        num_rows = len(self._rows_N)
        return keys[:num_rows, :, : self._num_columns], values[:num_rows, :, : self._num_columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused: positions and masks are always given."""
        return 0

    def _store_rows(self, store: torch.Tensor, states: torch.Tensor) -> None:
        if self._sources_N is not None:
            states = states[self._sources_N]
        store[self._first_row : self._first_row + states.shape[0], :, : states.shape[2]] = states

    def _empty(self, num_rows: int, num_columns: int) -> torch.Tensor:
        # numpy's zeros are pages that cost nothing until they are written
        return torch.from_numpy(
            np.zeros((num_rows, self._num_heads, num_columns, self._head_dim), dtype=np.float32)
        )
