"""An engine that reports success is asked for some of the weights that it was given."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from client_kit import run_with, sent
from safetensors.torch import save_file

from fa_rollout.client import EnginePool
from fa_rollout.client.base.errors import ControlRefused
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from trainer_hook.messages import Probe, Scored
from trainer_hook.model.index import ModelIndex
from trainer_hook.model.probes import Probes

READ = "/get_weights_by_name"
OLD = {"norm.weight": torch.ones(8), "o_proj.weight": torch.arange(12.0).reshape(3, 4) / 7}
NEW = {name: tensor * 1.01 + 0.003 for name, tensor in OLD.items()}


@pytest.fixture(scope="module")
def one() -> Iterator[ScriptedEngine]:
    with ScriptedEngine.start(lengths=Lengths(tokens=8)) as engine:
        yield engine


@pytest.fixture
def engine(one: ScriptedEngine) -> ScriptedEngine:
    one.configure(rules=[])
    one.clear()
    return one


def folder_of(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    return path


def probes_of(weights: dict[str, torch.Tensor], folder: Path) -> list[Probe]:
    probes = Probes(ModelIndex.read(folder))
    probes.look(weights)
    return probes.chosen


async def load(pool: EnginePool, path: Path, label: str, probes: list[Probe]) -> None:
    await pool.pause("retract")
    try:
        await pool.weights.load(str(path), label, probes=probes)
    finally:
        await pool.continue_()


def test_an_engine_that_holds_what_it_was_given_is_asked_once(engine: ScriptedEngine, tmp_path: Path) -> None:
    old, new = folder_of(tmp_path / "old", OLD), folder_of(tmp_path / "new", NEW)

    async def work(pool: EnginePool) -> None:
        for number in (1, 2):
            await load(pool, new, f"0:{number}", probes_of(NEW, old))

    run_with(engine, work)
    assert [r.body["name"] for r in sent(engine, READ)] == ["norm.weight", "o_proj.weight"]


def test_an_engine_that_skipped_what_it_was_given_is_an_error(engine: ScriptedEngine, tmp_path: Path) -> None:
    old = folder_of(tmp_path / "old", OLD)

    async def work(pool: EnginePool) -> None:
        with pytest.raises(ControlRefused, match=r"number 0 is 1, but 1.013.*it started with"):
            await load(pool, old, "0:1", probes_of(NEW, old))

    run_with(engine, work)


def test_an_engine_that_holds_something_else_is_an_error(engine: ScriptedEngine, tmp_path: Path) -> None:
    old = folder_of(tmp_path / "old", OLD)
    other = folder_of(tmp_path / "other", {name: tensor + 9 for name, tensor in NEW.items()})

    async def work(pool: EnginePool) -> None:
        with pytest.raises(ControlRefused, match=r"is engine\.model the model that it serves"):
            await load(pool, other, "0:1", probes_of(NEW, old))

    run_with(engine, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nests", [0, 1])
def test_an_engine_may_round_and_have_replicas(
    engine: ScriptedEngine, tmp_path: Path, dtype: torch.dtype, nests: int
) -> None:
    old = folder_of(tmp_path / "old", OLD)
    probes = probes_of(NEW, old)[:1]
    row = NEW["norm.weight"].to(dtype).float().tolist()
    rule = Rule(path=READ, body=json.dumps([row, row] if nests else row))

    async def work(pool: EnginePool) -> None:
        engine.configure(rules=[rule])
        await load(pool, old, "0:1", probes)

    run_with(engine, work)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(path=READ, status=404, body="{}"),
        Rule(path=READ, status=400, body='{"error":{"message":"Get parameter by name failed"}}'),
        Rule(path=READ, body="[1.0, 2.0]"),
        Rule(path=READ, body="null"),
    ],
)
def test_what_cannot_be_read_back_is_said_once(
    engine: ScriptedEngine, rule: Rule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = folder_of(tmp_path / "old", OLD)

    async def work(pool: EnginePool) -> None:
        engine.configure(rules=[rule])
        for number in (1, 2):
            await load(pool, old, f"0:{number}", probes_of(NEW, old))

    run_with(engine, work)
    told = [record for record in caplog.records if "weights_not_read_back" in record.getMessage()]
    assert len(told) == 1


def test_other_numbers_of_an_engine_that_quantizes_are_no_error(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    old = folder_of(tmp_path / "old", OLD)
    rules = [
        Rule(path=READ, body="[" + ",".join(["7.5"] * 8) + "]"),
        Rule(path="/server_info", body='{"quantization":"fp8"}'),
    ]

    async def work(pool: EnginePool) -> None:
        engine.configure(rules=rules)
        await load(pool, old, "0:1", probes_of(NEW, old)[:1])

    run_with(engine, work)


def test_probes_prefer_what_differs_and_leave_fused_and_large_weights_alone(tmp_path: Path) -> None:
    weights = {
        "a.norm.weight": torch.ones(4),
        "a.q_proj.weight": torch.zeros(2, 2),
        "a.experts.0.down_proj.weight": torch.zeros(2, 2),
        "a.o_proj.weight": torch.zeros(8, 8),
        "a.down_proj.weight": torch.zeros(3, 3),
        "a.scale": torch.zeros((), dtype=torch.float32),
        "a.ids": torch.zeros(4, dtype=torch.int32),
        "embed.weight": torch.zeros(1, 1).expand(1 << 12, (1 << 12) + 1),
    }
    index = ModelIndex.read(folder_of(tmp_path / "old", {n: t.contiguous() for n, t in weights.items()}))
    changed = weights | {name: weights[name] + 1 for name in ("a.o_proj.weight", "a.down_proj.weight")}
    probes = Probes(index)
    probes.look(changed)
    assert [probe.name for probe in probes.chosen] == [
        "a.down_proj.weight",
        "a.o_proj.weight",
        "a.norm.weight",
    ]
    assert [bool(probe.before) for probe in probes.chosen] == [True, True, False]
    assert [probe.num_rows for probe in probes.chosen] == [1, 1, 4]


IDS = [5, 12, 19, 26]
NOT_READ = Rule(path=READ, status=400, body='{"error":{"message":"Get parameter by name failed"}}')


def scores(*logprobs: float | None) -> Rule:
    """What the engine says of the text."""
    items = [[value, token, None] for value, token in zip((None, *logprobs), IDS, strict=False)]
    return Rule(prompt_start=IDS, meta={"input_token_logprobs": items})


def check_scores(
    engine: ScriptedEngine, tmp_path: Path, *rules: Rule, is_float32: bool = True, scored: bool = True
) -> None:
    """Load weights that cannot be read back, and compare what is expected of them with what `rules` say."""
    old = folder_of(tmp_path / "old", OLD)
    expected = Scored(input_ids=IDS, logprobs=[-1.0, -2.0, -3.0], is_float32=is_float32) if scored else None

    async def work(pool: EnginePool) -> None:
        engine.configure(rules=list(rules))
        for number in (1, 2):
            await pool.pause("retract")
            await pool.weights.load(str(old), f"0:{number}", probes=probes_of(NEW, old))
            await pool.weights.check_score(expected)
            await pool.continue_()

    run_with(engine, work)


def test_an_engine_that_cannot_be_read_back_must_score_as_the_trainer(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    with pytest.raises(ControlRefused, match=r"differ from the trainer's by 0\.4 on average"):
        check_scores(engine, tmp_path, NOT_READ, scores(-1.3, -1.7, -3.6))


@pytest.mark.parametrize(("dtype", "fails"), [("float32", True), ("bfloat16", False)])
def test_engines_that_round_may_differ_a_little(
    engine: ScriptedEngine, tmp_path: Path, dtype: str, fails: bool
) -> None:
    rules = NOT_READ, scores(-1.1, -2.1, -3.1), Rule(path="/server_info", body=f'{{"dtype":"{dtype}"}}')
    if fails:
        with pytest.raises(ControlRefused, match=r"limit 0\.02"):
            check_scores(engine, tmp_path, *rules)
    else:
        check_scores(engine, tmp_path, *rules)


@pytest.mark.parametrize(
    "rule", [Rule(prompt_start=IDS, status=400, body="{}"), scores(-1.0), scores(-1.0, None, -3.0)]
)
def test_an_engine_that_cannot_be_scored_is_named_once(
    engine: ScriptedEngine, tmp_path: Path, rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    check_scores(engine, tmp_path, NOT_READ, rule)
    assert sum("weights_unchecked" in record.getMessage() for record in caplog.records) == 1


def test_nothing_to_compare_with_is_said_once(
    engine: ScriptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_scores(engine, tmp_path, NOT_READ, scored=False)
    assert sum("weights_unchecked" in record.getMessage() for record in caplog.records) == 1


def test_an_engine_that_was_read_back_is_not_scored(engine: ScriptedEngine, tmp_path: Path) -> None:
    rule = Rule(path=READ, body=json.dumps(NEW["norm.weight"].tolist()))
    old = folder_of(tmp_path / "old", OLD)

    async def work(pool: EnginePool) -> None:
        engine.configure(rules=[rule])
        await load(pool, old, "0:1", probes_of(NEW, old)[:1])
        engine.clear()
        await pool.weights.check_score(Scored(input_ids=IDS, logprobs=[-1.0, -2.0, -3.0], is_float32=True))

    run_with(engine, work)
    assert sent(engine, "/generate") == []
