"""Who may ask an embedded engine, and what a request may cost it."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.embedded import EmbeddedEngine

KEY = "the-key-of-the-run"
PATHS = [
    *(
        ("GET", path)
        for path in ("/health", "/model_info", "/server_info", "/v1/loads", "/flush_cache", "/none")
    ),
    *(
        ("POST", path)
        for path in (
            *("/generate", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"),
            *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version"),
        )
    ),
]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[EmbeddedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_ROLLOUT_ENGINE_KEY", KEY)
        running = EmbeddedEngine.start(model_folder)
    with running:
        yield running


def ask(
    engine: EmbeddedEngine, method: str, path: str, body: Any = None, **headers: str | None
) -> tuple[int, str]:
    """Status and body; a header that is None is left out, `_` in its name stands for -."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent: dict[str, str | None] = {"Authorization": f"Bearer {KEY}"}
    if data is not None:
        sent["Content-Type"] = "application/json"
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(engine.host, engine.port, timeout=30)
    try:
        connection.request(method, path, data, {k: v for k, v in sent.items() if v is not None})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_path_wants_the_key(engine: EmbeddedEngine, method: str, path: str) -> None:
    body = {} if method == "POST" else None
    for given in (None, "", "Bearer ", f"Bearer {KEY}x", f"Basic {KEY}", KEY):
        assert ask(engine, method, path, body, Authorization=given)[0] == 401
    assert ask(engine, "GET", "/model_info")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_other_sites_are_refused_even_with_the_key(engine: EmbeddedEngine, headers: dict[str, str]) -> None:
    assert ask(engine, "GET", "/flush_cache", **headers)[0] == 403
    assert ask(engine, "POST", "/pause_generation", {}, **headers)[0] == 403
    assert ask(engine, "GET", "/ready")[0] == 200, "nothing was paused"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:7", "LOCALHOST:1"])
def test_own_names_are_answered(engine: EmbeddedEngine, host: str) -> None:
    assert ask(engine, "GET", "/health", Host=host)[0] == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_a_body_must_be_declared_as_json(engine: EmbeddedEngine, kind: str | None) -> None:
    assert ask(engine, "POST", "/pause_generation", b"{}", Content_Type=kind)[0] == 415
    assert ask(engine, "GET", "/ready")[0] == 200


def test_a_path_tells_nothing_about_files_that_are_no_weights(engine: EmbeddedEngine, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("secret")
    (tmp_path / "link.safetensors").symlink_to("/etc/passwd")
    (tmp_path / "outside").mkdir()
    index = {"weight_map": {"a": "../text"}}
    (tmp_path / "outside" / "model.safetensors.index.json").write_text(json.dumps(index))
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "a.safetensors")
    said = set()
    for path in ("/etc/passwd", "/etc/none", "/etc", "/root/none/x", str(tmp_path / "text"), str(pipe), "\0"):
        status, answer = ask(engine, "POST", "/update_weights_from_disk", {"model_path": path})
        assert status == 400
        said.add(json.loads(answer)["message"].replace(path, "PATH"))
    assert len(said) == 1
    for path in (tmp_path, tmp_path / "outside"):
        status, answer = ask(engine, "POST", "/update_weights_from_disk", {"model_path": str(path)})
        assert status == 400
        assert "root:" not in answer
        assert "secret" not in answer


DEEP = 200_000


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1], "sampling_params": {"n": 10**7}},
        {"input_ids": [[1]] * 5000, "sampling_params": {"max_new_tokens": 1}},
        {"input_ids": [[1]] * 100, "sampling_params": {"n": 100, "max_new_tokens": 1}},
        b'{"input_embeds": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"unknown": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"sampling_params": {"custom_params": {"a": ' + b"[" * DEEP + b"]" * DEEP + b"}}}",
        b"[" * DEEP,
        b'{"input_ids": [1], "sampling_params": {"n": 1' + b"0" * 5000 + b"}}",
    ],
)
def test_a_request_out_of_measure_is_answered_by_400(engine: EmbeddedEngine, body: Any) -> None:
    for path in ("/generate", "/update_weights_from_disk"):
        assert ask(engine, "POST", path, body)[0] == 400
    small = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    assert ask(engine, "POST", "/generate", small)[0] == 200


def test_memory_for_a_broadcast_is_taken_after_its_names_and_shapes_were_checked(
    engine: EmbeddedEngine,
) -> None:
    assert ask(engine, "POST", "/begin_weight_update", {})[0] == 200
    body = {"names": ["none"], "dtypes": ["float32"], "shapes": [[10**12]]}
    status, answer = ask(engine, "POST", "/update_weights_from_distributed", body)
    assert status == 400
    assert "names must be the model's own" in answer
    assert ask(engine, "POST", "/end_weight_update", {})[0] == 200


def test_an_engine_that_other_machines_reach_must_have_a_key(model_folder: Path) -> None:
    words = [sys.executable, "-m", "fa_rollout.engines.embedded", "--model", str(model_folder)]
    environment = {k: v for k, v in os.environ.items() if k != "FA_ROLLOUT_ENGINE_KEY"}
    ended = subprocess.run(
        [*words, "--host", "0.0.0.0"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "must have a key" in ended.stderr
    assert ended.stderr.count("\n") == 1
