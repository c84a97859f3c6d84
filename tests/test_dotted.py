"""A dotted path leads to an object, or the error says what form is accepted and what was found."""

import json
import os
import sys
from pathlib import Path

import pytest

from fa_rollout.config import ConfigError
from fa_rollout.user_code.dotted import resolve

FORM = r'"package\.module\.function" or "package\.module:function"'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is not on sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    return tmp_path


@pytest.mark.parametrize(
    "path", ["json.decoder.JSONDecoder", "json.decoder:JSONDecoder", "json:decoder.JSONDecoder"]
)
def test_modules_classes_and_functions_are_found_in_every_spelling(path: str) -> None:
    assert resolve(path, option="x") is json.decoder.JSONDecoder
    assert resolve("json.decoder.JSONDecoder.decode", option="x") is json.decoder.JSONDecoder.decode


def test_the_working_directory_is_importable(folder: Path) -> None:
    (folder / "dotted_pack").mkdir()
    (folder / "dotted_pack" / "inner.py").write_text("def found():\n    return 4\n")
    assert resolve("dotted_pack.inner.found", option="x")() == 4
    assert os.getcwd() in sys.path


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("json.lods", r"json has no attribute 'lods'; did you mean 'loads'\?"),
        ("json:decoder.qqqq", f"json.decoder has no attribute 'qqqq'; it must be .*{FORM}"),
        ("no_such_module.reward", f"no such module.*{FORM}"),
        ("no_such_module:reward", f"no such module.*{FORM}"),
        ("json.no_such_module.reward", "json has no attribute 'no_such_module'"),
        ("json.no_such_module:reward", f"no such module.*{FORM}"),
        ("lambda sample: 1.0", f"must be .*{FORM}, found 'lambda sample: 1.0'"),
        ("reward", f"must be .*{FORM}, found 'reward'"),
        ("json.", f"must be .*{FORM}"),
        ("json:", f"must be .*{FORM}"),
        ("", f"must be .*{FORM}"),
        ("json/decoder.py", f"must be .*{FORM}"),
        ("__main__.reward", f"fresh interpreter.*separate module.*{FORM}"),
    ],
)
def test_a_path_that_leads_nowhere_names_the_option_and_the_accepted_form(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^rollout.filter.*{says}"):
        resolve(path, option="rollout.filter")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_package_of_mine", "No module named 'no_such_package_of_mine'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def reward(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("from json import no_such_name", "cannot import name 'no_such_name'"),
    ],
)
def test_a_module_that_fails_to_import_is_told_in_one_line_with_the_place(
    code: str, says: str, folder: Path
) -> None:
    name = f"broken_{abs(hash(code))}"
    (folder / f"{name}.py").write_text(f"x = 1\n{code}\n")
    with pytest.raises(
        ConfigError, match=rf"importing {name} failed: .*{says}.* \(.*{name}\.py:2\)"
    ) as caught:
        resolve(f"{name}.reward", option="x")
    assert "\n" not in str(caught.value)
