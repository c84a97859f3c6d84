"""Checks before the start: each finds its fault, names the number and the way out, and runs no user code."""

from pathlib import Path

import pytest

from fa_rollout.config import ConfigError, from_dict
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.model_name import name_of
from fa_rollout.preflight import (
    Finding,
    Severity,
    check_command,
    check_data,
    check_descriptors,
    check_lengths,
    check_memory,
    check_model,
    check_output,
    check_proxies,
    check_reward,
    check_template,
)
from shm.ring.headroom import Headroom

GIB = 1 << 30


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1
    assert findings[0].fix
    return findings[0]


def test_a_ring_beyond_free_memory_is_an_error_that_names_the_limit() -> None:
    finding = only(check_memory(8 * GIB, Headroom(available_bytes=4 * GIB, limiter="cgroup /job")))
    assert finding.severity is Severity.ERROR
    assert "cgroup /job" in finding.text
    assert f"{4 * GIB:,}" in finding.text


def test_a_ring_of_more_than_half_of_free_memory_is_a_warning() -> None:
    finding = only(check_memory(3 * GIB, Headroom(available_bytes=4 * GIB, limiter="the machine")))
    assert finding.severity is Severity.WARNING


def test_a_ring_that_fits_is_fine() -> None:
    assert check_memory(GIB, Headroom(available_bytes=4 * GIB, limiter="the machine")) == []


def test_too_few_descriptors_for_the_concurrency() -> None:
    finding = only(check_descriptors(2000, limit=1024))
    assert finding.severity is Severity.ERROR
    assert "ulimit -n" in finding.fix
    assert check_descriptors(256, limit=1024) == []
    assert check_descriptors(10**6, limit=-1) == []


@pytest.mark.parametrize(
    ("urls", "environment", "num_findings"),
    [
        (["http://127.0.0.1:1"], {"http_proxy": "http://p:1"}, 0),
        (["http://[::1]:1"], {"http_proxy": "http://p:1"}, 0),
        (["http://gpu7:1"], {}, 0),
        (["http://gpu7:1"], {"http_proxy": "http://p:1"}, 1),
        (["http://gpu7:1"], {"ALL_PROXY": "http://p:1"}, 1),
        (["http://gpu7:1"], {"http_proxy": "http://p:1", "no_proxy": "other, gpu7"}, 0),
        (["http://gpu7.lan:1"], {"http_proxy": "http://p:1", "NO_PROXY": ".lan"}, 0),
        (["http://gpu7:1"], {"http_proxy": "http://p:1", "no_proxy": "*"}, 0),
        (["http://gpu7:1"], {"http_proxy": "http://p:1", "no_proxy": "pu7"}, 1),
    ],
)
def test_a_proxy_that_would_be_bypassed_is_told(
    urls: list[str], environment: dict[str, str], num_findings: int
) -> None:
    assert len(check_proxies(urls, environment)) == num_findings


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package whose import would leave a trace."""
    folder = tmp_path / "task_package"
    (folder / "deep").mkdir(parents=True)
    for file in (folder / "__init__.py", folder / "deep" / "__init__.py", folder / "deep" / "score.py"):
        file.write_text("raise RuntimeError('executed')")
    return tmp_path


@pytest.mark.parametrize("path", ["task_package.deep.score.reward", "task_package.deep.score:reward"])
def test_the_reward_module_is_found_without_being_executed(path: str, package: Path) -> None:
    assert check_reward(path, [str(package)]) == []


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("task_package.shallow.score.reward", "task_package.shallow"),
        ("nowhere.reward", "nowhere"),
        ("task_package.deep.score.more.reward", "task_package.deep.score.more"),
    ],
)
def test_a_missing_reward_module_is_named(path: str, named: str, package: Path) -> None:
    assert repr(named) in only(check_reward(path, [str(package)])).text


def test_a_reward_of_an_editable_install_is_found_from_any_folder() -> None:
    assert check_reward("fa_rollout.demo.task:sorting_reward", []) == []


def test_a_reward_in_folders_without_init_files_is_found(tmp_path: Path) -> None:
    (tmp_path / "bare" / "deep").mkdir(parents=True)
    (tmp_path / "bare" / "deep" / "score.py").touch()
    assert check_reward("bare.deep.score.reward", [str(tmp_path)]) == []
    assert "bare.deep.other" in only(check_reward("bare.deep.other.reward", [str(tmp_path)])).text


def test_a_reward_server_is_no_module() -> None:
    assert check_reward("http://localhost:8000/score", []) == []


@pytest.mark.parametrize("path", ["reward", ":reward", "a..b.reward", "a-b:reward", "module:"])
def test_a_reward_path_of_another_form_is_refused_with_the_accepted_ones(path: str) -> None:
    assert "package.module:function" in only(check_reward(path, [])).text


def test_data_must_exist_and_not_be_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert "matches no file" in only(check_data(str(tmp_path / "no.jsonl"))).text
    assert "empty" in only(check_data(str(tmp_path / "*.jsonl"))).text
    (tmp_path / "full.jsonl").write_text("{}")
    assert check_data(str(tmp_path / "*.jsonl")) == []


def test_model_folders_must_hold_what_is_read_from_them(tmp_path: Path) -> None:
    assert len(check_model(str(tmp_path), None, embedded=True)) == 2
    (tmp_path / "config.json").touch()
    (tmp_path / "tokenizer.json").touch()
    assert check_model(str(tmp_path), None, embedded=True) == []
    assert "engine.tokenizer" in only(check_model(str(tmp_path), "elsewhere", embedded=True)).text


def test_a_variable_that_the_chat_template_does_not_use_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if enable_thinking %}{{ messages }}{% endif %}")
    assert check_template(["enable_thinking"], str(tmp_path)) == check_template([], str(tmp_path)) == []
    finding = only(check_template(["enable_thinkin"], str(tmp_path)))
    assert finding.severity is Severity.WARNING
    assert "does not use 'enable_thinkin'" in finding.text
    (tmp_path / "chat_template.jinja").write_text("{% if")
    assert "not valid" in only(check_template(["x"], str(tmp_path))).text


def test_the_folder_of_logs_must_take_files_and_is_not_made(tmp_path: Path) -> None:
    assert "/proc" in only(check_output("/proc/none/out")).text
    assert check_output(str(tmp_path / "new" / "out")) == []
    assert not (tmp_path / "new").exists()
    assert check_output(None) == []


def test_the_trainers_program_must_exist() -> None:
    assert "no-such-program" in only(check_command(["no-such-program", "x"])).text
    assert check_command(["sh", "-c", "x"]) == []
    assert check_command([]) == []


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-0.5B", "https://huggingface.co/Qwen/Qwen2.5-0.5B"])
def test_a_hub_name_is_answered_with_the_command_that_makes_a_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = only(check_model(text, None, embedded=True))
    assert "engine.model must be a local folder" in finding.text
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B" in finding.fix
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen2.5-0.5B"):
        Tokenizer.load(text)


def test_a_path_that_is_not_there_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for text in ("models/qwen", "./Qwen/x", "/Qwen/x", "a/b/c"):
        assert name_of(text) is None


def test_the_folder_of_logs_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "must be a folder" in only(check_output(str(tmp_path / "out" / "run"))).text


def with_limits(**sections: dict[str, int]) -> list[Finding]:
    rollout = {"num_steps": 1, "groups_per_step": 4, "samples_per_group": 4} | sections.pop("rollout", {})
    tree = {
        "data": {"path": "x"},
        "rollout": rollout,
        "reward": {"function": "a:b"},
        "engine": {"model": "m"},
    }
    return check_lengths(from_dict(tree | sections))


def test_lengths_that_cannot_go_together_are_known_before_the_run() -> None:
    assert with_limits() == []
    finding = only(with_limits(trainer={"max_tokens_per_micro_batch": 512}))
    assert finding.severity is Severity.WARNING
    assert "may have up to 513 tokens" in finding.text
    assert (
        only(with_limits(ring={"bytes": 1 << 10}, sampling={"max_new_tokens": 8})).severity
        is Severity.WARNING
    )
    assert only(with_limits(ring={"bytes": 100})).severity is Severity.ERROR
