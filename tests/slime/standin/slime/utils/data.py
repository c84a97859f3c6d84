"""Where a sample is from."""

from typing import Any


def get_source(sample: Any) -> str:
    return str(sample.metadata.get("source_name", ""))
