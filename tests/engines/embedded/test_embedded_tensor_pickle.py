"""Pushed tensors: read as torch writes them, and nothing in the bytes has power."""

import collections
import io
import os
import pickle
import struct
from typing import Any

import pytest
import torch

from fa_rollout.engines.embedded.errors import WeightsRefused
from fa_rollout.engines.embedded.routes.tensor_pickle import read_tensors


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8],
)
def test_tensors_come_as_torch_writes_them(dtype: torch.dtype, protocol: int) -> None:
    whole = torch.randn(6, 5).to(dtype)
    tensors = {"whole": whole, "view": whole[1:3].T, "scalar": whole[0, 0], "empty": whole[:0]}
    found = read_tensors(pickle.dumps(list(tensors.items()), protocol=protocol))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(torch.float32))


class _Calls:
    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self._reduced = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


HOSTILE = {
    "code": _Calls(os.system, "true"),
    "state on an allowed global": _Calls(collections.OrderedDict, state={"x": 1}),
    "a global by itself": torch._utils._rebuild_tensor_v2,
    "a storage that is none": _Calls(torch.storage._load_from_bytes, pickle.dumps(1)),
    "a set": {1},
    "a large integer": 1 << 4000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_anything_else_is_refused_and_does_nothing(kind: str) -> None:
    before = dict(vars(torch._utils))
    with pytest.raises(WeightsRefused):
        read_tensors(pickle.dumps([("name", HOSTILE[kind])], protocol=4))
    assert dict(vars(torch._utils)) == before
    assert read_tensors(pickle.dumps([("a", torch.ones(2))], protocol=4))["a"].tolist() == [1.0, 1.0]


def test_a_build_on_an_allowed_global_is_refused() -> None:
    data = b"\x80\x04ctorch._utils\n_rebuild_tensor_v2\n}\x8c\x01x\x8c\x01ysb."
    with pytest.raises(WeightsRefused, match="found SETITEM"):
        read_tensors(data)
    assert not hasattr(torch._utils._rebuild_tensor_v2, "x")


@pytest.mark.parametrize(
    ("size", "stride", "offset"), [((1 << 31,), (0,), 0), ((2,), (5,), 0), ((4,), (1,), 1), ((2,), (-1,), 1)]
)
def test_a_tensor_is_never_larger_than_its_bytes(size: tuple[int], stride: tuple[int], offset: int) -> None:
    storage = torch.zeros(4).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    built = _Calls(
        torch._utils._rebuild_tensor_v2, typed, offset, size, stride, False, collections.OrderedDict()
    )
    with pytest.raises(WeightsRefused):
        read_tensors(pickle.dumps([("a", built)], protocol=4))


def test_a_storage_that_lies_about_its_length_is_refused() -> None:
    data = pickle.dumps([("a", torch.zeros(4))], protocol=4)
    assert data.count(struct.pack("<q", 4)) == 1
    for count in (3, 5, 1 << 40):
        with pytest.raises(WeightsRefused):
            read_tensors(data.replace(struct.pack("<q", 4), struct.pack("<q", count)))


def test_bytes_cut_anywhere_are_refused() -> None:
    data = pickle.dumps([("a", torch.ones(3))], protocol=4)
    for length in range(len(data)):
        with pytest.raises(WeightsRefused):
            read_tensors(data[:length])
    assert io.BytesIO(data).read() == data
