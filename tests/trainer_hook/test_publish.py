"""Weights arrive in files as they are in the model: whole, once, under the names that engines know."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.disk import disk_of
from trainer_hook.errors import PublishFailed
from trainer_hook.model.fit import fitting
from trainer_hook.weights import publish as publishing


def publish(source: Any, folder: Path, **options: Any) -> list[Path]:
    return publishing.publish(fitting(source, None, partial=False), folder, **options)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))


def assert_same(files: list[Path], expected: dict[str, torch.Tensor]) -> None:
    written = {}
    for path in files:
        if path.suffix == ".safetensors":
            written.update(load_file(path))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)


def test_tied_weights_are_written_once_under_their_first_name(tmp_path: Path) -> None:
    model = Tied()
    files = publish(model, tmp_path)
    expected = model.state_dict()
    del expected["head.weight"]
    assert [path.name for path in files] == ["model.safetensors"]
    assert_same(files, expected)


def test_tied_tensors_of_a_mapping_are_written_once(tmp_path: Path) -> None:
    state = Tied().state_dict()
    assert_same(publish(state, tmp_path), {k: v for k, v in state.items() if k != "head.weight"})


def test_dtypes_and_values_are_kept_and_views_are_made_whole(tmp_path: Path) -> None:
    fused = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
    state = {
        "q": fused[:2],
        "k": fused[2:4],
        "transposed": fused.T,
        "scalar": torch.tensor(3.5),
        "none": fused[:0],
    }
    assert_same(publish(state, tmp_path), state)


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(3, 2))
        wrapped = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
        (tmp_path / "weights").mkdir()
        assert_same(publish(wrapped, tmp_path / "weights"), model.state_dict())
    finally:
        torch.distributed.destroy_process_group()


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path) -> None:
    state = {f"w{index}": torch.full((10,), float(index)) for index in range(5)}
    state["big"] = torch.arange(100.0)
    files = publish(state, tmp_path, max_file_bytes=100)
    assert [path.name for path in files][:1] == ["model-00001-of-00004.safetensors"]
    assert_same(files, state)
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 600
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)


def test_a_rank_that_only_gathers_writes_nothing(tmp_path: Path) -> None:
    assert publish(Tied(), tmp_path, write=False) == []
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    state = {"small": torch.zeros(10), "big": torch.zeros(100_000)}
    with disk_of(50_000), pytest.raises(PublishFailed, match=f"written whole to {tmp_path}"):
        publish(state, tmp_path, max_file_bytes=1000)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    huge = torch.zeros(1).expand(1 << 45)
    with pytest.raises(PublishFailed, match=f"{4 << 45} bytes are needed"):
        publish({"huge": huge}, tmp_path)


@pytest.mark.parametrize("source", [{}, {"a": 1}, [torch.zeros(1)]])
def test_a_source_without_tensors_is_refused(source: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tensor"):
        publish(source, tmp_path)


def version(folder: Path, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    folder.mkdir()
    frozen = {f"frozen{index}": torch.full((10,), float(index)) for index in range(4)}
    moving = {f"moving{index}": torch.full((10,), float(index)) for index in range(4)}
    return frozen | moving | changes


def files_in(folder: Path) -> dict[str, torch.Tensor]:
    """What an engine reads that is told this folder: the files of its index, or the only one."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
    files = [folder / name for name in names] if names else list(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


SHARDED = """
import sys, torch
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard
from tests.disk import disk_of
from trainer_hook.errors import PublishFailed
from trainer_hook.weights.gathering import Gathering, on_host
from trainer_hook.model.fit import fitting
from trainer_hook.weights.publish import publish

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False))
model[2].weight = model[0].weight
if rank == 0:
    torch.save(model.state_dict(), folder / "expected")
mesh = torch.distributed.init_device_mesh("cpu", (2,))
fully_shard(model, mesh=mesh)
(folder / "weights").mkdir(exist_ok=True)
pieces = fitting(model, None, partial=False)
publish(pieces, folder / "weights", write=rank == 0, max_file_bytes=100)
try:
    publish(pieces, folder / "missing", write=rank == 0, max_file_bytes=100)
except PublishFailed:
    assert rank == 0
weights = Gathering(pieces, 100)
if rank:
    weights.attend()
else:
    expected = torch.load(folder / "expected")
    buckets = list(weights.buckets(on_host))
    assert len(buckets) > 2
    assert all(torch.equal(tensor, expected[name]) for bucket in buckets for name, tensor in bucket.items())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_weights_are_gathered_by_all_ranks_also_when_the_writer_fails(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDED, str(rank), str(tmp_path)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    expected = torch.load(tmp_path / "expected")
    del expected["2.weight"]
    assert_same(sorted((tmp_path / "weights").iterdir()), expected)


def test_a_part_is_completed_by_the_weights_of_another_folder(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in "123")
    whole = version(first)
    publish(whole, first)
    part = {"moving0": torch.full((10,), 7.0)}
    for folder, base in ((second, first), (third, second)):
        folder.mkdir()
        files = publish(part, folder, rest=base, max_file_bytes=100)
        assert_same(files, whole | part)
        assert files_in(folder).keys() == whole.keys()
    with pytest.raises(PublishFailed, match="completed"):
        publish(part, third, rest=tmp_path / "nowhere")
