"""The pickles that SGLang takes as tensors, read without unpickling.

In: bytes that came over a socket. Out: named tensors by value. Invariant: a small machine reads the bytes,
which knows lists, tuples, numbers, texts and tensors; nothing is imported, called or built by the names in
them, and no tensor has more elements than its storage.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa_rollout.engines.embedded.errors import WeightsRefused

_DTYPES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_STORAGE_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGE_PROTOCOL = 1001
_COUNT_BYTES = 8


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Tensors by name, from a pickled list of (name, tensor).

    Raises:
        WeightsRefused: it is none, or holds something else.
    """
    try:
        pairs = _Machine(io.BytesIO(data)).load()
    except WeightsRefused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise WeightsRefused(
            f"serialized_named_tensors must be whole pickles of tensors: {error}."
        ) from error
    are_pairs = isinstance(pairs, list) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
    if not are_pairs or not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in pairs):
        raise WeightsRefused("serialized_named_tensors must be lists of (name, tensor).")
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in pairs}


@dataclass(frozen=True, slots=True)
class _Name:
    """A global of the pickle: compared with those that a tensor needs, never looked up."""

    module: str
    name: str


class _Mark:
    pass


_MARK = _Mark()


class _Machine:
    """Reads one pickle from a file, and leaves the file behind its end."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def load(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self._file):
            name = opcode.name
            if name in _IGNORED:
                continue
            if name in _VALUES:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _STEPS:
                _STEPS[name](self, argument)
            else:
                raise WeightsRefused(f"serialized_named_tensors must hold tensors alone, found {name}.")
        return self._stack.pop()

    def put(self, index: int) -> None:
        if index != len(self._memo):
            raise ValueError(f"memo {index} comes before {len(self._memo)}")
        self._memo.append(self._stack[-1])

    def memoize(self, _: None) -> None:
        self._memo.append(self._stack[-1])

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def tuple_of(self, number: int) -> None:
        items = tuple(self._stack[len(self._stack) - number :])
        if len(items) != number or _MARK in items:
            raise ValueError("a tuple without its items")
        del self._stack[len(self._stack) - number :]
        self._stack.append(items)

    def above_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def append(self, items: list[Any]) -> None:
        whole = self._stack[-1]
        if not isinstance(whole, list):
            raise ValueError("something is appended to what is no list")
        whole.extend(items)

    def set_items(self, _: None) -> None:
        """A dictionary of facts about the writer, which nobody reads."""
        self.above_mark()
        if not isinstance(self._stack[-1], dict):
            raise ValueError("something is set in what is no dictionary")

    def global_of(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(_Name(module, name))

    def stack_global(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Name(str(module), str(name)))

    def reduce(self, _: None) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        make = _FUNCTIONS.get(function) if isinstance(function, _Name) else None
        if make is None:
            found = f"{function.module}.{function.name}" if isinstance(function, _Name) else "something"
            raise WeightsRefused(
                f"serialized_named_tensors must hold tensors by value alone, found {found}: "
                "pickle them plainly, not as handles of shared memory."
            )
        self._stack.append(make(*arguments))

    def persistent(self, _: None) -> None:
        kind, storage, _key, _place, count, _view = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Name) or storage.module != "torch":
            raise ValueError("a persistent id that is no storage")
        self._stack.append((_DTYPES[storage.name], count))


_IGNORED = {"PROTO", "FRAME", "STOP"}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MEMOIZE": _Machine.memoize,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "TUPLE": lambda machine, _: machine._stack.append(tuple(machine.above_mark())),
    "APPEND": lambda machine, _: machine.append([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.above_mark()),
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.global_of,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "BINPERSID": _Machine.persistent,
}


def _storage(data: bytes) -> torch.Tensor:
    """All elements of a storage, flat, from what torch writes for one: five pickles, then the data."""
    file = io.BytesIO(data)
    magic, protocol, _facts, (dtype, count), _keys = (_Machine(file).load() for _ in range(5))
    if magic != _STORAGE_MAGIC or protocol != _STORAGE_PROTOCOL or not isinstance(dtype, torch.dtype):
        raise ValueError("a storage that torch did not write")
    start = file.tell() + _COUNT_BYTES
    told, found = int.from_bytes(data[file.tell() : start], "little"), len(data) - start
    if told != count or found != count * dtype.itemsize:
        raise ValueError(f"a storage of {count} elements, {told} told, with {found} bytes")
    return torch.frombuffer(bytearray(data[start:]), dtype=dtype) if count else torch.empty(0, dtype=dtype)


def _tensor(
    storage: torch.Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _requires_grad: bool,
    _hooks: dict[Any, Any],
    *_metadata: Any,
) -> torch.Tensor:
    """A view of a storage; never of more elements than it has, so that a copy takes no more memory."""
    if len(size) != len(stride) or min((offset, *size, *stride), default=0) < 0:
        raise ValueError(f"a tensor of size {size} and stride {stride} from {offset}")
    num_elements = 1
    for n in size:
        num_elements *= n
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if num_elements > storage.numel() or (num_elements and last >= storage.numel()):
        raise ValueError(f"a tensor of size {size} from {offset} in a storage of {storage.numel()} elements")
    return storage.as_strided(size, stride, offset)


_FUNCTIONS: dict[_Name, Callable[..., Any]] = {
    _Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    _Name("torch.storage", "_load_from_bytes"): _storage,
    _Name("collections", "OrderedDict"): dict,
}
