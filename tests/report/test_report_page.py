"""The page in a real browser: it shows something, fits a phone, needs nothing else, complains of nothing."""

import asyncio
import io
from pathlib import Path

import pytest
from PIL import Image

from fa_rollout.cli import main
from tests.records.conftest import Recorded
from tests.report import browser
from tests.report.browser import Look

PROGRAM = browser.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is installed"
    ),
]
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
SCRIPT = """(() => {
  const area = document.querySelector(".area[data-tip]");
  const box = area.getBoundingClientRect();
  const there = {clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true};
  area.dispatchEvent(new PointerEvent("pointermove", there));
  const cut = [...document.querySelectorAll("main *")].filter((e) => {
    const r = e.getBoundingClientRect();
    return r.width > 0 && r.right > innerWidth + 1 && !e.closest(".scroll") && !e.closest("svg");
  });
  return {
    overflow: document.documentElement.scrollWidth - innerWidth,
    cut: cut.map((e) => e.outerHTML.slice(0, 120)),
    tip: document.querySelector(".tip").textContent,
    charts: document.querySelectorAll("figure").length,
    unlabelled: [...document.querySelectorAll("svg")].filter((e) => !e.getAttribute("aria-label")).length,
    small: [...document.querySelectorAll("main *")].filter(
      (e) => !e.childElementCount && e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 11
    ).length,
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
  };
})()"""


async def looks(page: Path) -> dict[tuple[int, bool], Look]:
    assert PROGRAM is not None
    async with browser.opened(PROGRAM) as tab:
        return {
            (width, is_dark): await tab.look(page.as_uri(), width=width, is_dark=is_dark, script=SCRIPT)
            for width, is_dark in SCREENS
        }


def test_the_page_is_whole_on_a_desk_and_on_a_phone_in_light_and_in_the_dark(
    recorded: Recorded, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    assert main(["report", str(recorded.folder), "--output", str(path)]) == 0
    papers = {}
    for (width, is_dark), look in asyncio.run(looks(path)).items():
        assert look.complaints == []
        found = look.answer
        assert found["overflow"] <= 0, found
        assert found["cut"] == []
        assert found["small"] == 0
        assert found["unlabelled"] == 0
        assert found["charts"] >= 9
        assert "step" in found["tip"]
        papers[is_dark] = found["paper"], found["ink"]
        picture = Image.open(io.BytesIO(look.png)).convert("RGB")
        assert picture.width == width
        assert picture.height > 2000
        colours = picture.getcolors(maxcolors=1 << 24)
        assert colours is not None
        assert len(colours) > 100, "a page that is not blank"
    assert papers[True] != papers[False]


def test_a_long_word_does_not_widen_a_phone(recorded: Recorded, tmp_path: Path) -> None:
    path, nowhere = tmp_path / "report.html", tmp_path / ("long" * 40)
    assert main(["report", str(recorded.folder), "--output", str(path), "--tokenizer", str(nowhere)]) == 0
    look = asyncio.run(looks(path))[390, False]
    assert Image.open(io.BytesIO(look.png)).width == 390
