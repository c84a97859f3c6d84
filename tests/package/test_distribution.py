"""What is built from this repository holds what it must, and nothing else. No network, no installation."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fa_rollout", "shm", "trainer_hook")
HEAVY = {
    "transformers",
    "accelerate",
    "pyarrow",
    "ray",
    "sglang",
    "slime",
    "matplotlib",
    "datasets",
    "wandb",
    "vllm",
}
BUILD = """\
import sys
from setuptools import build_meta
folder = sys.argv[1]  # builds change the arguments
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and a source distribution, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("package")
    sources = folder / "sources"
    # What is left behind by runs and builds stays here, so that it must be kept out by the build itself.
    left = shutil.ignore_patterns(".*", "out", "site", "build", "dist", "*.egg-info", "work")
    shutil.copytree(ROOT, sources, ignore=left)
    (sources / "examples" / "own_trainer" / "work").mkdir()
    (sources / "examples" / "own_trainer" / "work" / "model.safetensors").touch()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def names_in_wheel(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing is compiled: one wheel for every machine"
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_is_the_packages_and_nothing_else(built: Path) -> None:
    names = names_in_wheel(built)
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    found = {name for name in names if ".dist-info/" not in name}
    assert found == wanted
    assert {f"{name}/py.typed" for name in PACKAGES} <= found
    assert {PurePosixPath(name).parts[0] for name in found} == {*PACKAGES}, "tests and their kits stay out"


def test_product_names_no_test_equipment() -> None:
    """Not in an import, and not as a module that is started by its name."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        assert not re.search(r"\btests[./]\w|\bpytest\b", path.read_text(encoding="utf-8")), path


def test_wheel_tells_its_terms_and_its_needs(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (folder,) = {PurePosixPath(name).parts[0] for name in archive.namelist() if ".dist-info/" in name}
    about = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
    assert about["License-Expression"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert about["Requires-Python"] == ">=3.11"
    assert "fa-rollout-proc = fa_rollout.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()
    plain = {requirement for requirement in about.get_all("Requires-Dist") if "extra ==" not in requirement}
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in plain}
    assert not names & HEAVY
    assert {"torch", "numpy", "msgspec"} <= names


def test_page_of_the_installation_shows_what_comes_along() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"```text\nfa-rollout\n(.*?)```", page, flags=re.S)
    shown = {line.split()[1].lower() for line in tree.splitlines() if re.match(r"[├└]", line)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert shown == {re.match(r"[\w.-]+", need)[0].lower() for need in project["dependencies"]}
    extras = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M))
    assert extras == set(project["optional-dependencies"])


def test_sources_are_the_whole_repository(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in sources.getnames()}
    for wanted in ("LICENSE", "README.md", "constraints.txt", "setup.cfg", "mkdocs.yml", "scripts/test"):
        assert wanted in names
    assert {name for name in names if name.startswith("tests/")}
    assert "docs/img/sample.svg" in names
    assert not {name for name in names if {"__pycache__", ".venv", "site"} & {*PurePosixPath(name).parts}}


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_sources_are_of_every_python_that_is_promised(minor: int) -> None:
    """The grammar; `scripts/test` runs on one of these Pythons, whichever it finds."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, minor))
