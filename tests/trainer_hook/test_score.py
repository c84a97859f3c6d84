"""How likely the trainer's model finds a short text: exact, without a trace, and only where it can be run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fa_rollout.demo.task import CHARACTERS
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.engines.reference import load_reference, reference_logprobs
from trainer_hook.model.score import score


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load_reference(write_tiny_model(tmp_path / "model", characters=CHARACTERS, seed=1))


def test_a_score_is_the_models_own_and_leaves_no_trace(model: Any) -> None:
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    scored = score(torch.compile(model, backend="eager"))
    assert scored is not None
    assert scored.is_float32
    ids = scored.input_ids
    assert scored.logprobs == pytest.approx(reference_logprobs(model, ids[:1], ids[1:]), abs=1e-4)
    assert [module.training for module in model.modules()] == before
    assert all(weight.grad is None for weight in model.parameters())


def test_what_cannot_be_run_here_has_no_score(model: Any) -> None:
    assert score(model.state_dict()) is None
    assert score(torch.nn.Linear(3, 3)) is None
    next(model.parameters()).ds_id = 1  # DeepSpeed keeps the weight elsewhere
    assert score(model) is None


def test_a_model_that_wants_more_than_ids_has_no_score(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(**_: Any) -> None:
        raise ValueError("pixel_values are needed")

    monkeypatch.setattr(model, "forward", forward)
    assert score(model) is None
