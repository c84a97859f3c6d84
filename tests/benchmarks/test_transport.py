"""The transport benchmark runs end to end and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_a_short_run_has_all_rows_and_names_who_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "transport.json"
    command = [sys.executable, "-m", "benchmarks.transport", "--json", str(results), "--quick"]
    done = subprocess.run(
        [*command, "--seconds", "0.02", "--peers", "mp.Queue"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tree = json.loads(results.read_text())
    rows = {(row["contender"], row["size"], row["form"]) for row in tree["rows"]}
    assert len(rows) == 4 * 2 * 2
    assert all(row["groups_per_s"] > 0 and row["producer_us"] > 0 for row in tree["rows"])
    assert set(tree["idle_cpu"]) == {"ring", "ring through hub", "ring of 12 MiB", "mp.Queue"}
    assert {entry["what"] for entry in tree["times_as_fast"]} >= {"both packed: ring / mp.Queue"}
    assert results.with_suffix(".png").stat().st_size > 1000
    assert "mp.Queue" in done.stdout
