"""The pages, and the blocks of code in them."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced piece of a page."""

    page: str
    line: int
    language: str
    title: str | None
    """The file that the reader shall write it to."""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """All that a reader may find code in."""
    return (
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    )


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in pages() for block in blocks_of(page) if block.language in languages]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text[: match.start()].count("\n") + 1,
                language=match["language"],
                title=title[1] if title else None,
                text=match["text"],
            )
        )
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, each as its words; continued lines are one, comments are none."""
    lines = text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]
