"""The first rows of a float32 weight in a folder of safetensors files, read without torch."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np


def first_rows(folder: Path, name: str, num_rows: int) -> list[Any] | None:
    """None where the folder has no such weight, or one of another type."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            entry = json.loads(file.read(size)).get(name)
            if entry is not None and entry["dtype"] == "F32":
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                whole = np.frombuffer(file.read(end - start), dtype="<f4")
                rows: list[Any] = whole.reshape(entry["shape"])[:num_rows].tolist()
                return rows
    return None
