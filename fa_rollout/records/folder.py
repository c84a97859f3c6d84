"""A run's output folder: which launches it holds, and where their tokenizer is.

In: a path, and which launch is meant. Out: its `History`. Invariant: the folder is only read, so that it may
belong to a run that goes on.
"""

from pathlib import Path

from fa_rollout.account import event_file
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.records.history import History, histories
from shm.errors import FaRolloutError


class NoRecords(FaRolloutError, ValueError):
    """The folder is not one that a run has written to."""


def launches(folder: Path) -> list[History]:
    """Every launch that the folder holds, oldest first; one at least.

    Raises:
        NoRecords: there is none.
    """
    path = folder / event_file.FILE_NAME
    if not path.is_file():
        raise NoRecords(
            f"{folder} must be the output folder of a run, found no {event_file.FILE_NAME} in it; name the "
            "folder that run.output_dir of the run's configuration says"
        )
    found = histories(event_file.read(path))
    if not found:
        raise NoRecords(
            f"{path} must hold a launch, found none: the run has not begun, or is of an old release"
        )
    return found


def choose(found: list[History], number: int | None) -> History:
    """The last launch, or the one of this number, counted from 1.

    Raises:
        NoRecords: there are not so many.
    """
    if number is None:
        return found[-1]
    if not 1 <= number <= len(found):
        raise NoRecords(f"--launch must be from 1 to {len(found)}, found {number}")
    return found[number - 1]


def tokenizer_of(history: History, folder: str | None) -> Tokenizer:
    """The run's tokenizer, or the one of a folder that is named.

    Raises:
        ConfigError: the folder is not there, or holds none.
        NoRecords: the run's configuration names none.
    """
    engine = history.config.get("engine") or {}
    found = engine.get("tokenizer") or engine.get("model")
    if folder is not None:
        return Tokenizer.load(folder)
    if found is None:
        raise NoRecords(
            "the run's configuration names no tokenizer (the engines told it): give --tokenizer FOLDER"
        )
    return Tokenizer.load(str(Path(history.folder, found)))
