"""Many records through writer, hub and several readers at full speed, every byte checked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("ring_stream.py")


def _stream(num_records: int, num_readers: int) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, str(_SCRIPT), "hub", str(num_records), str(num_readers)],
        env={**os.environ, "PYTHONPATH": str(_SCRIPT.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    counts: dict[str, int] = json.loads(result.stdout)
    return counts


def _check(num_records: int) -> None:
    counts = _stream(num_records, num_readers=4)
    assert counts["num_admitted"] == counts["num_freed"] == num_records
    assert counts["num_read"] == 2 * num_records  # each by two of the readers
    assert counts["num_refused"] == counts["num_live"] == counts["num_leases"] == 0
    assert counts["num_laps"] > num_records // 1000


def test_every_record_of_a_long_stream_is_read_true() -> None:
    _check(8_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_record_of_a_million_is_read_true() -> None:
    _check(1_000_000)
