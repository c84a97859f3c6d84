"""What a rank hears that waits in vain for a batch."""

import threading
from collections.abc import Callable

import pytest

from tests.hub.rig import VOCAB_SIZE, Rig
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook.errors import Stalled

MakeRig = Callable[..., Rig]


def test_a_rank_that_waits_for_an_engine_that_is_gone_hears_which_and_for_how_long(
    rig: MakeRig, capfd: pytest.CaptureFixture[str]
) -> None:
    """All its requests fail at once; the outage is reported once."""
    script = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=1000), tokens_per_s=50.0)
    with (
        ScriptedEngine.start(script) as engine,
        rig(engine={"urls": [engine.url]}, trainer={"stall_s": 4}) as run,
        run.attach() as hook,
    ):
        run.until(lambda: engine.state()["num_running"] == 24)
        threading.Timer(0.7, engine.process.kill).start()
        with (
            pytest.raises(Stalled, match=rf"no engine answers: {engine.url} for [1-4] s \("),
            hook.next_batch(),
        ):
            pass
    assert capfd.readouterr().err.count("event=abort_not_delivered") <= 1
