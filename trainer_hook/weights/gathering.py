"""The full weights of a model, in buckets of bounded size.

In: pieces of a model. Out: its tensors by the engines' names, a bucket at a time.

Invariants: at most one bucket of full tensors is made ahead; every rank takes part in every gathering
collective, in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_hook.model.parts import is_sharded
from trainer_hook.model.pieces import Piece

if TYPE_CHECKING:
    import torch


class Gathering:
    """The weights of one source; can be iterated repeatedly."""

    def __init__(self, pieces: Sequence[Piece], bucket_bytes: int) -> None:
        """A tensor larger than a bucket gets its own bucket."""
        self._pieces = pieces
        self.sizes = {name: size for piece in pieces for name, size in _sizes(piece).items()}
        self._firsts = _firsts(self.sizes, bucket_bytes)
        self.num_buckets = len(self._firsts) + 1

    @property
    def device(self) -> "torch.device":
        """Device of the first tensor."""
        return self._pieces[0].parts[0].sources[0].device

    def buckets(
        self, place: "Callable[[torch.Tensor], torch.Tensor]", *, wanted: Callable[[], bool] = lambda: True
    ) -> "Iterator[dict[str, torch.Tensor]]":
        """The current full tensors, each passed through `place` as soon as it is made.

        All ranks must iterate to the end. Buckets are empty while `wanted` returns False.
        """
        bucket: dict[str, torch.Tensor] = {}
        for piece in self._pieces:
            made = _made(piece, wanted=wanted)
            for name in _sizes(piece):
                if name in self._firsts:
                    yield bucket
                    bucket = {}
                if name in made:
                    bucket[name] = place(made.pop(name).detach())
        yield bucket

    def attend(self) -> None:
        """Take part in gathering, on ranks that need no full tensors."""
        for _ in self.buckets(lambda tensor: tensor, wanted=lambda: False):
            pass


def _made(piece: Piece, *, wanted: Callable[[], bool]) -> "dict[str, torch.Tensor]":
    """The full weights of a piece. Parts are gathered even if not wanted, and the result is then empty."""
    import torch

    with torch.no_grad():
        wholes = [_gathered(tensor) for part in piece.parts for tensor in part.sources]
        return piece.make(wholes) if wanted() else {}


def num_bytes(tensor: "torch.Tensor") -> int:
    return tensor.numel() * tensor.element_size()


def on_host(tensor: "torch.Tensor") -> "torch.Tensor":
    """Contiguous, on the CPU, with its own storage, as files and pickles require."""
    tensor = tensor.detach().to("cpu").contiguous()
    owns_storage = tensor.untyped_storage().nbytes() == num_bytes(tensor)
    return tensor if owns_storage else tensor.clone()


def _gathered(tensor: "torch.Tensor") -> "torch.Tensor":
    """The full tensor of a DTensor (a collective: all its ranks must call it); other tensors unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _sizes(piece: Piece) -> dict[str, int]:
    """Bytes of each weight that it sends, by name."""
    return {
        sent: num_bytes(tensor)
        for name, tensor in piece.outputs.items()
        for sent in piece.sent_as.get(name, (name,))
    }


def _firsts(sizes: Mapping[str, int], bucket_bytes: int) -> set[str]:
    """Names that begin a bucket, except the first."""
    firsts: set[str] = set()
    held = 0
    for name, size in sizes.items():
        if held and held + size > bucket_bytes:
            firsts.add(name)
            held = 0
        held += size
    return firsts
