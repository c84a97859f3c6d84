"""The generator's spare: it takes over at once, says nothing before, and is not missed when it is gone."""

import time
from collections.abc import Callable

import psutil

from fa_rollout.hub.server.generator_process import SPARE_AFTER_S, START_LIMIT_S, GeneratorLife
from shm.ring.segment import Segment
from tests.hub.rig import WITH_SPARE, Rig, add_up, words
from trainer_hook import TrainerHook
from trainer_hook.messages import Resume

MakeRig = Callable[..., Rig]


def generators(run: Rig) -> list[psutil.Process]:
    """Those that live, the oldest first."""
    children = psutil.Process(run.process.pid).children()
    found = [child for child in children if "fa_rollout.generator" in words(child)]
    return sorted(found, key=lambda process: process.create_time())


def train(hook: TrainerHook, num_steps: int) -> None:
    for _ in range(num_steps):
        with hook.next_batch():
            pass
        with hook.update_weights():
            pass


def assert_trained(run: Rig) -> None:
    ended = run.hear()
    assert ended.exit_code == 0  # type: ignore[attr-defined]
    assert add_up(ended.counts)  # type: ignore[attr-defined]
    assert ended.counts["trained"] == 24  # type: ignore[attr-defined]


def test_the_spare_is_the_next_generator_and_gets_a_spare_of_its_own(rig: MakeRig) -> None:
    with rig(run=WITH_SPARE) as run:
        with run.attach() as hook:
            train(hook, 2)
            run.until(lambda: len(generators(run)) == 2)
            first, spare = generators(run)
            first.kill()
            run.until(lambda: len(run.events("generator_ready")) == 2)
            assert generators(run)[0] == spare
            run.until(lambda: len(generators(run)) == 2)
            train(hook, 4)
        assert_trained(run)


def test_a_spare_that_is_gone_is_replaced_by_a_fresh_start(rig: MakeRig) -> None:
    with rig(run=WITH_SPARE) as run:
        with run.attach() as hook:
            train(hook, 2)
            run.until(lambda: len(generators(run)) == 2)
            first, spare = generators(run)
            spare.kill()
            first.kill()
            train(hook, 4)
        assert_trained(run)


def test_a_spare_that_stands_still_is_replaced_as_soon_as_a_generator_would_be() -> None:
    ring = Segment.create(1 << 16)
    life = GeneratorLife(
        preamble=b"", ring_fd=ring.fd, max_restarts=9, module="tests.hub.silent", has_spare=True
    )
    resume = Resume(incarnation=1, head=0, tail=0, sequence=0, version=0, lineage="", weights=None)
    try:
        life.start(resume)
        now_s = time.monotonic()
        assert not life.is_silent(now_s + START_LIMIT_S - 1, 5.0), "it may still load"
        life.heard(is_ready=True)
        for later_s in (0.0, 2 * SPARE_AFTER_S):
            life.keep_spare(now_s + later_s)
        life.kill()
        life.reap()
        life.start(resume)
        promoted_s = life.last_heard_s = now_s + 10 * START_LIMIT_S
        assert not life.is_silent(promoted_s + 4, 5.0)
        assert life.is_silent(promoted_s + 6, 5.0)
    finally:
        life.kill()
        life.reap()
        life.dismiss_spare()
        ring.close()


def test_without_a_spare_there_is_one_generator(rig: MakeRig) -> None:
    with rig() as run:
        with run.attach() as hook:
            train(hook, 3)
            first = generators(run)[0]
            first.kill()
            train(hook, 3)
            assert len(generators(run)) == 1
        assert_trained(run)
