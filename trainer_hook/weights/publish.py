"""Writes weights to safetensors files, which engines load from a folder.

In: pieces. Out: `model.safetensors`, or numbered files and an index, with the names that transformers uses.

Invariants: at most one file's worth of gathered tensors is in memory; every rank takes part in every
gathering collective, also after the writer has failed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_hook.model.pieces import Piece
from trainer_hook.weights.gathering import Gathering, on_host
from trainer_hook.weights.weight_files import WeightFiles

if TYPE_CHECKING:
    import torch

MAX_FILE_BYTES = 128 << 20


def publish(
    pieces: Sequence[Piece],
    folder: str | Path,
    *,
    write: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
    rest: str | Path | None = None,
    look: "Callable[[Mapping[str, torch.Tensor]], None]" = lambda bucket: None,
) -> list[Path]:
    """Write all weights of the pieces into `folder` and return the files, the index last.

    Tensors keep their dtype. Tied weights are written once, under their first name. A tensor larger than
    `max_file_bytes` gets a file of its own.

    Args:
        pieces: the result of `fitting` for a module or a state dict.
        write: False on ranks that only take part in gathering sharded tensors.
        look: called with every bucket before it is written.
        rest: folder with the other weights; they are added, so that `folder` contains all.

    Raises:
        PublishFailed: the files could not be written (disk full); partial files are removed.
    """
    weights = Gathering(pieces, max_file_bytes)
    if not write:
        weights.attend()
        return []
    files = WeightFiles(Path(folder), weights.num_buckets)
    others = None if rest is None else files.open_rest(Path(rest), weights.sizes)
    files.check_room(sum(weights.sizes.values()) + (0 if others is None else sum(others.sizes.values())))
    for bucket in weights.buckets(on_host, wanted=lambda: files.failure is None):
        look(bucket)
        files.write(bucket)
    if others is not None:
        files.complete(others, max_file_bytes)
    return files.finish()
