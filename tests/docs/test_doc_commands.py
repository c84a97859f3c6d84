"""Every command of the pages: run, or parsed, or on a short list with the reason.

`fa-rollout-proc` commands go through the real parser up to the point where they would begin; what only tells
something is run to its end. `tests/examples` follows whole pages: of examples, and the first ten minutes.
"""

import re
import subprocess
import sys
import tomllib

import pytest
from doc_kit import ROOT, Block, blocks, commands

from fa_rollout import cli
from fa_rollout.config.keys import take_flags

NOT_RUN_HERE = {
    "curl": "asks a server of the reader's",
    "source": "changes the reader's shell",
    "export": "changes the reader's shell",
    "cd": "changes the reader's shell",
    "mkdir": "makes the reader's folder",
    "jq": "a program of the reader's",
    "git": "fetches a repository",
}
"""Commands that are no part of this project."""

COMMANDS = [
    pytest.param(block, words, id=f"{block.place} {' '.join(words)}"[:90])
    for block in blocks("bash")
    for words in commands(block.text)
]


@pytest.mark.parametrize(("block", "words"), COMMANDS)
def test_command_is_one(block: Block, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program = words[0]
    if program == "fa-rollout-proc":
        is_accepted(words[1:], capsys)
    elif program.startswith("scripts/"):
        is_script(program, words[1:])
    elif program in ("pip", "pipx"):
        names_extras(words)
    elif program in ("python", "python3"):
        names_a_file(block, words[1:])
    elif program == "torchrun":
        assert words[-1].endswith(".py")
    else:
        assert program in NOT_RUN_HERE, f"{block.place}: nobody checks {' '.join(words)}"


def is_accepted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The words go through the parser; help, version and completion are run."""
    words = words[: words.index("|")] if "|" in words else words
    words = words[: words.index(">")] if ">" in words else words
    if {"--help", "--help-keys", "--version", "completion"} & set(words):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
        assert not code
        assert capsys.readouterr().out
        return
    own, command = (words[: words.index("--")], words[words.index("--") :]) if "--" in words else (words, [])
    own, changes = take_flags(own)
    options = cli.parser().parse_args(own)
    assert callable(options.call)
    assert options.takes_command or not command
    assert options.takes_keys if changes else True


def is_script(program: str, arguments: list[str]) -> None:
    """The script is there, may be executed, and knows the options."""
    script = ROOT / program
    assert script.stat().st_mode & 0o111
    known = script.read_text(encoding="utf-8")
    if "fa-rollout-proc demo" in known:
        cli.parser().parse_args(["demo", *arguments])
        return
    for name in (word for word in arguments if word.startswith("--")):
        assert name in known or name in told_by(program), f"{program} knows no {name}"


def told_by(program: str) -> str:
    """What a script says of itself."""
    done = subprocess.run(
        [sys.executable, ROOT / program, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def names_extras(words: list[str]) -> None:
    """Extras of this project that a page wants installed exist; so do its files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(project["optional-dependencies"])
    for word in words:
        for extras in re.findall(r"(?:fa-rollout|\.)\[([^\]]+)\]", word):
            assert set(extras.split(",")) <= known
        if word == "constraints.txt":
            assert (ROOT / word).is_file()


def names_a_file(block: Block, arguments: list[str]) -> None:
    """A Python file is one of the page, of the page's folder or of the repository; a module can be found."""
    if arguments[0] == "-m":
        module = arguments[1].replace(".", "/")
        found = arguments[1] == "venv" or (ROOT / module).is_dir() or (ROOT / f"{module}.py").is_file()
        assert found, f"no module {arguments[1]}"
        return
    shown = {other.title for other in blocks("python") if other.page == block.page}
    folder = (ROOT / block.page).parent
    near = [folder / arguments[0], folder / "../own_trainer" / arguments[0], ROOT / arguments[0]]
    assert arguments[0] in shown or any(path.is_file() for path in near), f"no file {arguments[0]}"


PATHS = sorted(
    {
        (str(page.relative_to(ROOT)), path)
        for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md")))
        for path in re.findall(
            r"`((?:docs|scripts|examples|tests|benchmarks|trainer_hook|shm)/[\w./]+|fa_rollout/[\w/]+(?:\.py|/))`",
            page.read_text(encoding="utf-8"),
        )
    }
)


@pytest.mark.parametrize(("page", "path"), PATHS)
def test_path_that_a_page_names_is_there(page: str, path: str) -> None:
    assert (ROOT / path).exists(), f"{page} names {path}"
