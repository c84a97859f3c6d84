"""What a run opens: nothing beyond loopback, nothing without the run's key, no file to another user."""

import http.client
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fa_rollout.demo.plan import prepare
from tests.launcher.processes import Launch

pytestmark = pytest.mark.slow

NOBODY = 65534
SILENCE_S = 0.3
"""For ports of other protocols, which do not answer HTTP."""


@pytest.fixture(params=["disk", "distributed"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launch]:
    """A demo that is under way, under an umask that hides nothing, in folders that anybody may enter."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    umask = os.umask(0)
    try:
        folder = tmp_path / "out"
        plan = prepare(folder, model="tiny", seed=0, num_steps=400, staleness=2, url=None)
        text = plan.config.read_text()
        plan.config.write_text(text.replace("[trainer]", f'[trainer]\npublish = "{request.param}"'))
        launch = Launch(folder, *plan.command)
    finally:
        os.umask(umask)
    try:
        launch.until(
            lambda: plan.figures.exists() and plan.figures.read_text().count("\n") >= 2, timeout_s=90
        )
        yield launch
    finally:
        launch.destroy()


def listening(launch: Launch) -> dict[tuple[str, int], str]:
    """Addresses on which the launcher or anything below it listens, and who does."""
    launch.look()
    found = {}
    for process in (psutil.Process(launch.process.pid), *launch.seen.values()):
        try:
            connections = process.net_connections("inet")
            name = " ".join(process.cmdline()[:4])
        except psutil.NoSuchProcess:
            continue
        for one in connections:
            if one.status == psutil.CONN_LISTEN:
                found[one.laddr.ip, one.laddr.port] = name
    return found


def status(address: str, port: int, timeout_s: float, **headers: str) -> int | None:
    """Of a GET; None where nothing there speaks HTTP."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", "/model_info", headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@pytest.mark.timeout(180)
def test_nothing_is_open_to_others(run: Launch) -> None:
    found = listening(run)
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}, found
    port = int((run.folder / "engine-0.log").read_text().partition('"port": ')[2].partition(",")[0])
    assert status("127.0.0.1", port, 10.0) == 401
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert status("127.0.0.1", port, 10.0, **headers) == 403
    others = [(address, other) for address, other in found if other != port]
    assert {status(*one, SILENCE_S) for one in others} <= {None, 401, 403}, found
    assert_private(run)


def assert_private(run: Launch) -> None:
    """No key is on a command line, and another user can read nothing."""
    for process in run.seen.values():
        if process.is_running():
            assert "--api-key" not in process.cmdline()
    if os.geteuid() == 0:
        find = ["find", str(run.folder), "-type", "f", "-readable"]
        ended = subprocess.run(
            find, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=False
        )
        assert ended.stdout == ""
    for name in ("events.jsonl", "metrics.jsonl", "engine-0.log"):
        assert (run.folder / name).stat().st_mode & 0o077 == 0
