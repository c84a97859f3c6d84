"""SIGTERM, as a cluster's scheduler sends it: the step in hand is ended and saved, nothing is lost."""

import signal
import time
from pathlib import Path

import pytest

from fa_rollout.account.events import HubEnded, StepTrained
from tests.chaos import ledger, truth
from tests.chaos.job import GRACE_S, Job, Launch

pytestmark = pytest.mark.slow


def wait_for_step(job: Job, launch: Launch, step: int) -> None:
    deadline_s = time.monotonic() + 60
    while (saved := job.checkpoint()) is None or saved["state"]["step"] < step:
        assert launch.process.poll() is None, (job.folder / "launches.log").read_text()
        assert time.monotonic() < deadline_s
        launch.look()
        time.sleep(0.02)


@pytest.mark.timeout(240)
def test_a_job_that_is_preempted_saves_every_step_it_trained_and_goes_on_later(tmp_path: Path) -> None:
    with Job(tmp_path / "job", num_steps=8, seed=5, num_engines=1) as job:
        launch = Launch(job)
        try:
            wait_for_step(job, launch, 3)
            told_s = time.monotonic()
            launch.process.send_signal(signal.SIGTERM)
            assert launch.process.wait(60) == 128 + signal.SIGTERM
            assert time.monotonic() - told_s < 10 * GRACE_S, "a bound, for a busy machine"
            assert not launch.left()
            log = truth.read_events(job.folder)
            saved = job.checkpoint()
            assert saved is not None
            trained = [event.step for event in log if isinstance(event, StepTrained)]
            assert saved["state"]["step"] == max(trained) + 1, "each step that was trained is saved"
            assert isinstance(log[-1], HubEnded)
        finally:
            launch.destroy()
        again = Launch(job)
        try:
            assert again.process.wait(90) == 0
        finally:
            again.destroy()
        samples = truth.trained_samples(job)
        truth.check_conservation(job, samples, ledger.check(truth.read_events(job.folder)))
        truth.check_truth(job, samples)
