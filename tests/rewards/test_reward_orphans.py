"""Reward workers never outlive their runner, however it ends, and whatever they are doing."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from reward_kit import is_alive, wait_until

RUNNER = f"""
import asyncio, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from reward_kit import make_sample, running

async def main():
    deeds = sys.argv[1].split(",")
    async with running(num_workers=len(deeds), timeout_s=600) as runner:
        if "fork" in sys.argv and not os.fork():
            time.sleep(30)  # holds all descriptors of the runner
            os._exit(0)
        log, child = sys.argv[2] + "/log", sys.argv[2] + "/child"
        await runner.score([make_sample(do=deed, log=log, child=child) for deed in deeds])

asyncio.run(main())
"""


def start(tmp_path: Path, deeds: str, *more: str) -> subprocess.Popen[bytes]:
    script = tmp_path / "runner.py"
    script.write_text(textwrap.dedent(RUNNER))
    return subprocess.Popen([sys.executable, str(script), deeds, str(tmp_path), *more])


def calls(tmp_path: Path) -> list[int]:
    log = tmp_path / "log"
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_runner_is_killed_its_workers_and_their_children_go(
    how: signal.Signals, tmp_path: Path
) -> None:
    runner = start(tmp_path, "sleep,hold_the_interpreter,hang_with_a_child")
    try:
        wait_until(lambda: len(calls(tmp_path)) == 3, "all three rewards run")
        workers = [child.pid for child in psutil.Process(runner.pid).children(recursive=True)]
        assert len(workers) == 7, "three workers, their nurses, and a child"
    finally:
        runner.send_signal(how)
        runner.wait()
    wait_until(lambda: not any(map(is_alive, workers)), "all workers are gone", timeout_s=5)


def test_a_fork_of_the_runner_that_lives_on_keeps_no_worker_alive(tmp_path: Path) -> None:
    runner = start(tmp_path, "sleep", "fork")
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: len(calls(tmp_path)) == 1, "the reward runs")
        family = psutil.Process(runner.pid).children(recursive=True)
        (worker,) = calls(tmp_path)
        nurse = psutil.Process(worker).ppid()
        (fork,) = [child.pid for child in family if child.pid not in (worker, nurse)]
        runner.kill()
        runner.wait()
        wait_until(lambda: not is_alive(worker), "the worker is gone", timeout_s=5)
        assert is_alive(fork)
    finally:
        runner.kill()
        runner.wait()
        for child in family:
            if child.is_running():
                child.kill()


def test_workers_live_on_while_the_thread_that_started_them_ends(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys, threading, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from reward_kit import children, is_alive, make_sample, running

            async def main():
                async with running(num_workers=2) as runner:
                    await runner.score([make_sample()])
                    ready.set()
                    await asyncio.sleep(3600)

            def body():
                started.extend([1])
                loop = asyncio.new_event_loop()
                loop.run_until_complete(start(loop))

            async def start(loop):
                context = running(num_workers=2)
                kept.append((loop, context, await context.__aenter__()))

            started, kept = [], []
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
            workers = children()
            time.sleep(1.0)
            assert len(workers) == 2 and all(map(is_alive, workers)), workers
            loop, context, runner = kept[0]
            assert loop.run_until_complete(runner.score([make_sample(2)]))[0].value == 2.0
            loop.run_until_complete(runner.aclose())
            loop.close()
            """
        )
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
