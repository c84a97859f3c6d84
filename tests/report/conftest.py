"""The recorded run of the records' tests."""

from tests.records.conftest import recorded

__all__ = ["recorded"]
