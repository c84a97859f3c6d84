"""Deaths on either side: found at once, said once, and never taken for something else."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from peer import Completion, Hub, Line, hub_process

from trainer_hook import HookStateError, HubLost, Stalled, TrainerHook
from trainer_hook import messages as m
from trainer_hook.messages import Outcome, Part

HERE = Path(__file__).parent
GROUP = [Completion(prompt=[1, 2], response=[3, 4, 5])]


@pytest.mark.parametrize("how", ["never-answer", "never-answer-and-leave-a-child"])
def test_a_killed_hub_ends_a_wait_within_two_seconds(tmp_path: Path, how: str) -> None:
    with hub_process(tmp_path, how) as (where, process), TrainerHook.attach(**where) as hook:
        killed_s: list[float] = []

        def kill() -> None:
            killed_s.append(time.monotonic())
            process.kill()

        timer = threading.Timer(0.3, kill)
        timer.start()
        with pytest.raises(HubLost, match=f"process {process.pid}"), hook.next_batch():
            pass
        assert time.monotonic() - killed_s[0] < 2
        timer.join()


def test_a_hub_killed_while_training_is_lost_at_the_next_call_and_views_stay(tmp_path: Path) -> None:
    with hub_process(tmp_path, "serve") as (where, process), TrainerHook.attach(**where) as hook:
        with hook.next_batch() as batch:
            kept = batch.samples[0].tokens
            process.kill()
            process.wait(10)
            assert batch.micro_batches()[0].tokens.tolist() == [1, 2, 3, 4, 5]
        for _ in range(2):
            with pytest.raises(HubLost):
                hook.statistics()
        assert kept.tolist() == [1, 2, 3, 4, 5]


def test_a_stopped_hub_is_a_stall_not_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_hook.session.session.REPLY_TIMEOUT_S", 0.2)
    with hub_process(tmp_path, "serve") as (where, process), TrainerHook.attach(**where) as hook:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Stalled, match="the hub is running"):
            hook.pause()
        os.kill(process.pid, signal.SIGCONT)
        with hook.next_batch() as batch:
            assert batch.step == 0


# --- forks ----------------------------------------------------------------------------------------------


def in_child(body: object) -> int:
    """Fork, run `body` in the child, return the child's exit code; 0 is success."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_reads_its_parents_tensors_and_gives_nothing_back(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        record = line.ring.write(0, GROUP)
        line.serve([record], [[Part(0, 0)]])
        said = line.receive(m.Released)
        assert said == m.Released(step=0, outcome=Outcome.TRAINED, sequences=[record.sequence])
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with hook.next_batch() as batch:
            kept = batch.samples[0].arrays.tokens

            def child() -> None:
                nonlocal kept
                assert kept.tolist() == [1, 2, 3, 4, 5]
                assert batch.samples[0].arrays.tokens.tolist() == [1, 2, 3, 4, 5]
                del kept
                batch.close()
                with pytest.raises(HookStateError, match="forked child"):
                    hook.pause()
                with pytest.raises(HookStateError, match="forked child"), hook.next_batch():
                    pass
                hook.close()

            assert in_child(child) == 0
            del kept
        assert hook.step == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_block_that_ends_in_a_forked_child_ends_only_there(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        record = line.ring.write(0, GROUP)
        line.serve([record], [[Part(0, 0)]])
        assert line.receive(m.Released).outcome == Outcome.TRAINED
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        block = hook.next_batch()
        block.__enter__()
        assert in_child(lambda: block.__exit__(None, None, None)) == 0
        block.__exit__(None, None, None)


# --- how a trainer ends ---------------------------------------------------------------------------------

TRAINER = """
import sys
from trainer_hook import TrainerHook

hook = TrainerHook.attach(address=sys.argv[1], run=sys.argv[2], token=sys.argv[3])
with hook.next_batch() as batch:
    pass
{end}
"""
IN_ITS_BLOCK = "with hook:\n    raise {}"


@pytest.mark.parametrize(
    ("end", "last_words"),
    [
        ("", "goodbye"),
        ("raise RuntimeError('out of memory')", "death"),
        ("import os; os._exit(0)", "death"),
        (IN_ITS_BLOCK.format("RuntimeError('out of memory')"), "death"),
        (IN_ITS_BLOCK.format("KeyboardInterrupt"), "death"),
        (IN_ITS_BLOCK.format("SystemExit(1)"), "death"),
        (IN_ITS_BLOCK.format("SystemExit(0)"), "goodbye"),
        (IN_ITS_BLOCK.format("SystemExit"), "goodbye"),
        (IN_ITS_BLOCK.format("__import__('trainer_hook').EndOfData('it ended')"), "goodbye"),
    ],
)
def test_a_trainer_that_ends_in_order_says_goodbye_and_one_that_fails_does_not(
    tmp_path: Path, end: str, last_words: str
) -> None:
    heard = []

    def script(line: Line) -> None:
        line.serve([line.ring.write(0, GROUP)], [[Part(0, 0)]])
        line.receive(m.Released)
        try:
            line.receive(m.Goodbye)
            heard.append("goodbye")
        except EOFError:
            heard.append("death")

    with Hub(tmp_path, script) as hub:
        subprocess.run(
            [sys.executable, "-c", TRAINER.format(end=end), *hub.where.values()],
            timeout=60,
            check=False,
            stderr=subprocess.DEVNULL,
        )
    assert heard == [last_words]
