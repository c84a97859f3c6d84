"""A real hub with its generator and a scripted engine, as those who look at it find it."""

from collections.abc import Callable

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.launcher.running import ActiveRun
from fa_rollout.observe.observer import Observer
from tests.hub.rig import Rig
from trainer_hook import TrainerHook

MakeRig = Callable[..., Rig]


def running(rig: Rig) -> ActiveRun:
    """As the launcher's note would say it."""
    return ActiveRun(
        address=rig.address, run=rig.run_id, token=rig.token, folder=str(rig.folder), began_s=0.0, pid=1
    )


def train(hook: TrainerHook, num_steps: int) -> None:
    """Steps with an update after each, whose weights are the old ones."""
    for _ in range(num_steps):
        with hook.next_batch():
            pass
        with hook.update_weights():
            pass


def until(rig: Rig, observer: Observer, condition: Callable[[Snapshot], object]) -> Snapshot:
    """The first snapshot for which it holds."""
    seen: list[Snapshot] = []

    def look() -> object:
        seen[:] = [observer.snapshot(10.0)]
        return condition(seen[0])

    rig.until(look)
    return seen[0]
