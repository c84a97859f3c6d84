"""Each way to the engines brings the very weights: a job of two ranks, short, with everything real.

What the ring says of every token is recomputed by the trainer with its own weights of the same version.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.demo.task import CHARACTERS, sorting_prompts
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.kit.embedded import EmbeddedEngine
from tests.kit.sglang_cpu.launch import SGLangServer
from tests.launcher.processes import Launch

NUM_STEPS = 3
CONFIG = """
[data]
path = "{folder}/prompts.jsonl"
[rollout]
num_steps = {num_steps}
groups_per_step = 4
samples_per_group = 2
staleness = 1
[sampling]
max_new_tokens = 24
seed = 7
[reward]
function = "fa_rollout.demo.task:sorting_reward"
[engine]
urls = {urls}
tokenizer = "{folder}/model"
[ring]
bytes = "1MiB"
[trainer]
num_ranks = {num_ranks}
publish = "{via}"
bucket_bytes = "16KiB"
weights_dir = "{folder}/weights"
[run]
output_dir = "{folder}"
"""

ENGINES = ["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)])]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("engine")
    model = write_tiny_model(folder / "model", characters=CHARACTERS, seed=1)
    if request.param == "sglang":
        with SGLangServer.start(model, log=folder / "sglang.log") as server:
            yield model, server.url
    else:
        with EmbeddedEngine.start(model) as embedded:
            yield model, embedded.url


def give_first_weights(url: str, model: Path) -> None:
    """Whatever the test before has left there."""
    body = json.dumps({"model_path": str(model), "weight_version": "default"}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/update_weights_from_disk", data=body, headers=headers)
    with open_url(request) as answer:
        assert answer.status == 200


def open_url(request: urllib.request.Request | str) -> Any:
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


def trained(
    folder: Path, model: Path, urls: list[str], via: str, command: list[str], *, num_ranks: int
) -> list[dict[str, Any]]:
    """What the ranks of a whole job saw."""
    (folder / "model").symlink_to(model)
    rows = sorting_prompts(32, seed=0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = CONFIG.format(
        folder=folder, urls=json.dumps(urls), num_steps=NUM_STEPS, via=via, num_ranks=num_ranks
    )
    (folder / "run.toml").write_text(text)
    launch = Launch(folder, *command)
    try:
        assert launch.end(timeout_s=100) == 0, launch.stderr
    finally:
        launch.destroy()
    return [
        json.loads(line)
        for rank in range(num_ranks)
        for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("via", ["tensor", "distributed"])  # by disk: test_truth
def test_every_token_is_of_the_weights_that_were_pushed(
    engine: tuple[Path, str], via: str, tmp_path: Path
) -> None:
    model, url = engine
    give_first_weights(url, model)
    trainer = ["-m", "tests.end_to_end.checking_trainer", str(model), str(tmp_path)]
    command = [sys.executable, "-m", "fa_rollout.ranks", "2", *trainer]
    samples = trained(tmp_path, model, [url], via, command, num_ranks=2)
    assert len(samples) == NUM_STEPS * 8
    assert max(sample["difference"] for sample in samples) < 1e-4
    assert len({version for sample in samples for version in sample["versions"]}) > 1
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("via", ["tensor", "distributed"])
def test_an_engine_that_dies_in_the_middle_of_a_push_hangs_nothing(tmp_path: Path, via: str) -> None:
    model = write_tiny_model(tmp_path / "weights-at-first", characters=CHARACTERS, seed=1)
    with EmbeddedEngine.start(model) as first, EmbeddedEngine.start(model) as doomed:
        trainer = ["-m", "tests.end_to_end.losing_trainer", str(model), str(tmp_path), str(doomed.pid)]
        urls = [first.url, doomed.url]
        samples = trained(tmp_path, model, urls, via, [sys.executable, *trainer], num_ranks=1)
        assert not doomed.is_alive
    assert len(samples) == NUM_STEPS * 8
    assert max(sample["difference"] for sample in samples) < 1e-4
    assert max(sample["version"] for sample in samples) == NUM_STEPS - 1
