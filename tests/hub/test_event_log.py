"""The log of events: whole lines, whatever ended the run before; a disk that is full costs the log alone."""

import json
from pathlib import Path

from fa_rollout.account.events import GeneratorStarted
from fa_rollout.hub.io.event_log import EventLog
from tests.disk import disk_of


def test_a_line_that_a_kill_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(2):
        with EventLog(path) as log:
            log.write(GeneratorStarted(incarnation=number))
        with path.open("ab") as file:
            file.write(b'{"t":1.0,"event":"issu')
    first, cut, second, _ = path.read_text().splitlines()
    assert [json.loads(line)["incarnation"] for line in (first, second)] == [0, 1]
    assert cut.endswith("issu")


def test_a_disk_that_takes_a_part_of_it_ends_the_log_with_a_reason(tmp_path: Path) -> None:
    with disk_of(100), EventLog(tmp_path / "events.jsonl") as log:
        for number in range(10):
            log.write(GeneratorStarted(incarnation=number))
        log.flush()
        assert log.failure is not None
        assert "ends here" in log.failure
        log.write(GeneratorStarted(incarnation=10))
