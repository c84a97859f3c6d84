"""The generator's spare: it takes over at once, says nothing before, and is not missed when it is gone."""

from collections.abc import Callable

import psutil

from tests.hub.rig import WITH_SPARE, Rig, add_up
from trainer_hook import TrainerHook

MakeRig = Callable[..., Rig]


def generators(run: Rig) -> list[psutil.Process]:
    """Those that live, the oldest first."""
    children = psutil.Process(run.process.pid).children()
    found = [child for child in children if "fa_rollout.generator" in child.cmdline()]
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


def test_without_a_spare_there_is_one_generator(rig: MakeRig) -> None:
    with rig() as run:
        with run.attach() as hook:
            train(hook, 3)
            first = generators(run)[0]
            first.kill()
            train(hook, 3)
            assert len(generators(run)) == 1
        assert_trained(run)
