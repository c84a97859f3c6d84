"""Command lines and variables of engines and router, from the configuration."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.client.engine import network
from fa_rollout.config import Config, ConfigError, from_dict
from fa_rollout.engines import with_key
from fa_rollout.launcher.engines import program
from fa_rollout.launcher.engines.engine_key import engine_key
from fa_rollout.preflight import check_launch

KEY = "the-key"


def config(model: str = "org/model", *, engine: dict[str, Any] | None = None, **launch: Any) -> Config:
    return from_dict(
        {
            "data": {"path": "prompts.jsonl"},
            "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
            "reward": {"function": "task.reward"},
            "engine": {"model": model} | (engine or {}),
            "launch": launch,
        }
    )


def command_of(one: program.ServerProgram, port: int = 31000) -> list[str]:
    """What the supervisor runs."""
    words = one.words(port, 9)
    return words[words.index("--") + 1 :]


def test_sglang_is_run_with_its_model_and_port_and_what_else_is_asked() -> None:
    one = program.engines(config(server="sglang", python="/venv/python", arguments=["--tp", "2"]), KEY)[0]
    place = ["--host", "127.0.0.1", "--port", "31000"]
    expected = [
        "/venv/python",
        with_key.__file__,
        "sglang.launch_server",
        "--model-path",
        "org/model",
        *place,
        "--tp",
        "2",
    ]
    assert command_of(one) == expected
    assert "http://127.0.0.1:31000" in one.words(31000, 9)


def test_a_folder_is_named_in_full_and_a_name_of_a_hub_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "model") in command_of(program.engines(config("model", server="sglang"), KEY)[0])
    assert "org/model" in command_of(program.engines(config(server="sglang"), KEY)[0])


def test_a_command_of_ones_own_is_filled_in_and_json_in_it_is_left_alone() -> None:
    words = ["serve", "{model}", "--at={host}:{port}", "--json", json.dumps({"port": 1}), "--seed", "{place}"]
    filled = ["serve", "org/model", "--at=127.0.0.1:31000", "--json", '{"port": 1}', "--seed", "1"]
    assert command_of(program.engines(config(server="sglang", number=2, command=words), KEY)[1]) == filled


def test_each_engine_sees_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engines = program.engines(config(server="sglang", number=2, gpus_per_engine=2), KEY)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in engines] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-8")
    engines = program.engines(config(server="sglang", number=3, gpus_per_engine=1), KEY)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in engines] == ["4", "5", "GPU-8"]
    named = program.engines(config(server="sglang", number=2, gpus_per_engine=1, gpus=["7", "6"]), KEY)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in named] == ["7", "6"]
    assert "CUDA_VISIBLE_DEVICES" not in program.engines(config(server="sglang"), KEY)[0].environment


def test_variables_are_filled_in() -> None:
    one = program.engines(config(server="sglang", number=2, environment={"SEED": "s{place}"}), KEY)[1]
    assert one.environment == {"SEED": "s1", with_key.KEY_VARIABLE: KEY}


def test_a_router_is_told_all_engines() -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    command = command_of(
        program.router(config(server="sglang", number=2, engine={"router": True}), urls, KEY)
    )
    assert command[command.index("--worker-urls") + 1 :] == urls
    assert "--disable-retries" in command
    other = program.router(config(router_command=["route", "{urls}", "--port={port}"]), urls, KEY)
    assert command_of(other) == ["route", *urls, "--port=31000"]


@pytest.mark.parametrize(
    ("balance", "policy"),
    [
        ("least_loaded", ["manual", "--assignment-mode", "min_load"]),
        ("group", ["manual", "--assignment-mode", "min_load"]),
        ("sample", ["manual", "--assignment-mode", "min_load"]),
        ("round_robin", ["round_robin", "--worker-urls", "http://127.0.0.1:1"]),
    ],
)
def test_a_router_balances_as_the_engines_would_be_without_it(balance: str, policy: list[str]) -> None:
    engine = {"router": True, "balance": balance}
    command = command_of(program.router(config(server="sglang", engine=engine), ["http://127.0.0.1:1"], KEY))
    place = command.index("--policy") + 1
    assert command[place : place + len(policy)] == policy


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"number": 3, "gpus_per_engine": 2, "gpus": ["0"]}, ["launch.gpus", "1 for 3 x 2"]),
        ({"command": ["serve"]}, ["launch.command", "sglang", "embedded"]),
        ({"number": 0}, ["launch.number"]),
        ({"silence_limit_s": "soon"}, ["launch.silence_limit_s", "soon"]),
    ],
)
def test_what_cannot_be_launched_is_refused_with_its_key(launch: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**launch)
    assert all(word in str(caught.value) for word in words)


def test_a_program_that_is_not_there_is_found_before_the_start() -> None:
    (finding,) = check_launch(config(server="sglang", python="/no/such/python"))
    assert finding.severity == "error"
    assert "/no/such/python" in finding.text
    assert "launch.python" in finding.fix
    assert check_launch(config(server="sglang")) == check_launch(config()) == []
    assert check_launch(config(server="sglang", command=["{python}", "serve.py"])) == []


def test_the_key_is_in_the_environment_alone() -> None:
    for one in (
        *program.engines(config(server="sglang", number=2), KEY),
        *program.engines(config(), KEY),
        program.router(config(server="sglang", engine={"router": True}), ["http://127.0.0.1:1"], KEY),
    ):
        assert one.environment[with_key.KEY_VARIABLE] == KEY
        assert KEY not in " ".join(one.words(31000, 9))
        assert KEY not in repr(one)
    assert with_key.KEY_VARIABLE == network.KEY_VARIABLE, "what the client sends"


def test_each_run_has_a_key_of_its_own_unless_the_user_chose_one() -> None:
    keys = {engine_key(config(), {}) for _ in range(10)}
    assert len(keys) == 10
    assert all(len(key) == 64 for key in keys)
    assert engine_key(config(), {with_key.KEY_VARIABLE: "chosen"}) == "chosen"
    for words in (["--api-key", "named"], ["--api-key=other", "--api-key=named"]):
        assert engine_key(config(server="sglang", arguments=words), {}) == "named"


@pytest.mark.parametrize(
    ("words", "has_key"),
    [
        (["--tp", "2"], True),
        ([], True),
        (["--tokenizer-worker-num", "1"], True),
        (["--tokenizer-worker-num", "4"], False),
        (["--tokenizer-worker-num=4"], False),
        (["--api-key", "own"], False),
        (["--api-key=own"], False),
    ],
)
def test_a_server_is_given_the_key_unless_it_has_one_or_takes_none(words: list[str], has_key: bool) -> None:
    assert with_key.with_key(words, KEY) == ([*words, "--api-key", KEY] if has_key else words)


def test_a_server_finds_the_key_in_its_arguments_and_nobody_else_does(tmp_path: Path) -> None:
    """In a module of its own name, with children that are spawned, as SGLang's are."""
    (tmp_path / "server_module.py").write_text(_SERVER)
    ended = subprocess.run(
        [sys.executable, with_key.__file__, "server_module", "--port", "1"],
        cwd=tmp_path,
        env={**os.environ, with_key.KEY_VARIABLE: KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.split("\n")[:2] == [
        f"parent __main__ ['--port', '1', '--api-key', '{KEY}'] False False",
        f"child __mp_main__ ['--port', '1', '--api-key', '{KEY}'] False False",
    ], ended.stderr


_SERVER = """
import multiprocessing, os, sys
from pathlib import Path

def tell(who):
    words, variables = (Path(f"/proc/self/{name}").read_text() for name in ("cmdline", "environ"))
    is_told = "the-key" in words, "the-key" in os.environ.values()
    print(who, __name__, sys.argv[1:], *is_told, flush=True)

if __name__ == "__main__":
    tell("parent")
    child = multiprocessing.get_context("spawn").Process(target=tell, args=("child",))
    child.start()
    child.join()
"""
