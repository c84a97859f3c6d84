"""The live view: asks once a second, draws what it hears, ends with the run.

In: an observer, a terminal. Out: the screen. Invariant: the terminal is left as it was found, however this
ends; a hub that does not answer is told on the screen and waited for.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fa_rollout.account.figures import StepFigures
from fa_rollout.account.snapshot import Snapshot
from fa_rollout.account.words import progress_line, seconds
from fa_rollout.observe.glyphs import glyphs_for
from fa_rollout.observe.observer import Observer, RunOver
from fa_rollout.observe.screen import draw
from trainer_hook.printable import printable

NUM_STEPS = 240
"""That curves are drawn of."""
NUM_LOOKS = 30
"""That the verdict rests on."""
SILENT_S = 3.0
ALL_LINES = 1000
_QUIT = (b"q", b"Q", b"\x1b", b"\x03")


class View:
    """What was heard so far, drawn for one console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._glyphs = glyphs_for(console.encoding)
        self._steps: deque[StepFigures] = deque(maxlen=NUM_STEPS)
        self._heard_s = time.monotonic()
        self._looks: deque[Snapshot] = deque(maxlen=NUM_LOOKS)
        self.now: Snapshot | None = None

    def take(self, snapshot: Snapshot) -> None:
        """The run's state, and the steps that are new."""
        self.now = snapshot
        self._looks.append(snapshot)
        self._steps += snapshot.steps
        self._heard_s = time.monotonic()

    def text(self, *, height: int | None = None, is_over: bool = False) -> Text:
        """The screen; `height` None: every line there is."""
        silent_s = time.monotonic() - self._heard_s
        note = f"NO ANSWER FOR {seconds(silent_s)}" if silent_s > SILENT_S else time.strftime("%H:%M:%S")
        if self.now is None:
            return Text(f"the hub is asked where the run stands ... {note}")
        return draw(
            self.now,
            list(self._steps),
            width=self._console.width,
            height=ALL_LINES if height is None else height,
            glyphs=self._glyphs,
            note=note,
            looks=self._looks,
            is_over=is_over,
        )


def watch(observer: Observer, console: Console, *, interval_s: float) -> RunOver | None:
    """Show a run until its end, or until somebody has seen enough (None)."""
    view = View(console)
    try:
        with (
            _ended_by_signals(),
            _keys() as keys,
            Live(view.text(), console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                until_s = time.monotonic() + interval_s
                observer.ask()
                while (left_s := until_s - time.monotonic()) > 0:
                    if _has_quit(observer, keys, left_s):
                        return None
                    snapshot = observer.take()
                    if snapshot is not None:
                        view.take(snapshot)
                        live.update(view.text(height=console.height), refresh=True)
                live.update(view.text(height=console.height), refresh=True)
    except KeyboardInterrupt:
        return None
    except RunOver as over:
        if over.last is not None:
            view.take(over.last)
        if view.now is not None:
            console.print(view.text(is_over=True))
        return over


def follow(observer: Observer, console: Console, *, interval_s: float) -> RunOver:
    """One line now and then, where there is no terminal."""
    try:
        while True:
            console.print(Text(printable(progress_line(observer.snapshot(timeout_s=60.0)))), soft_wrap=True)
            time.sleep(interval_s)
    except RunOver as over:
        return over


def _has_quit(observer: Observer, keys: int | None, timeout_s: float) -> bool:
    """Wait for the hub or a key; whether the key says enough."""
    files = [observer.fileno(), *([] if keys is None else [keys])]
    readable, _, _ = select.select(files, [], [], timeout_s)
    if keys is None or keys not in readable:
        return False
    pressed = os.read(keys, 16)
    return not pressed or pressed in _QUIT


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Standard input, key by key; None where it is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this by an exception, so that the terminal is put right."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
