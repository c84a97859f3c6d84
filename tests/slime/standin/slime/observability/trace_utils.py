"""Spans on a sample's `trace`, in small."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Span:
    def __init__(self) -> None:
        self.attrs: dict[str, Any] = {}

    def update(self, attrs: dict[str, Any]) -> None:
        self.attrs.update(attrs)


@contextmanager
def trace_span(target: Any, name: str, attrs: dict[str, Any] | None = None) -> Iterator[Span]:
    span = Span()
    yield span
    target.trace = {"events": [{"type": "span_end", "name": name, "attrs": {**(attrs or {}), **span.attrs}}]}


def build_sglang_meta_trace_attrs(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        name: meta[name] for name in ("prompt_tokens", "completion_tokens", "e2e_latency") if name in meta
    }
