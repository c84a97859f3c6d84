"""The site builds, strictly, where `scripts/docs` was used or MkDocs is there, and holds what it says."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from doc_kit import ROOT

OWN = ROOT / ".venv-docs" / "bin" / "mkdocs"
MKDOCS = str(OWN) if OWN.is_file() else shutil.which("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a built site."""
    folder = tmp_path_factory.mktemp("site")
    assert MKDOCS is not None
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


needs_mkdocs = pytest.mark.skipif(MKDOCS is None, reason="MkDocs is not installed: scripts/docs does that")


@needs_mkdocs
def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


@needs_mkdocs
def test_api_has_docstrings(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "api.html").read_text(encoding="utf-8"))
    for wanted in ("next_batch", "Connects a trainer process", "append_tool", "micro_batches"):
        assert wanted in page


@needs_mkdocs
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for path in site.glob("*.html"):
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?|png|svg))"', path.read_text())
        assert not fetched, f"{path.name} asks others for {fetched}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(
        re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    )
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed
