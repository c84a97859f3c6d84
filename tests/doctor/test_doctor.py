"""The doctor: what is well is shown, what is not is named with its cure, nothing is left changed."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.examine import Examined, Unanswered, examine
from fa_rollout.config import Config, from_dict
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.doctor import engines, machine, model, prompts, user_code
from fa_rollout.doctor.outcome import CheckOutcome, CheckStatus
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.sample import Sample
from tests.kit.scripted import Script, ScriptedEngine

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
USER_CODE = """
import time
def reward(sample): print("a print of the user's"); return len(sample.response)
def parts(sample): return {"score": 1.0, "form": 0.5}
def raises(sample): raise KeyError("no answer")
def text(sample): return "good"
def slow(sample): time.sleep(0.01); return 1.0
def endless(sample): time.sleep(60)
def group(samples): return [float(s.member) for s in samples]
def keep(samples): return True
def keep_badly(samples): return 1
async def generate(context, sample, params): return sample
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole task: model, prompts, user code; and the current folder."""
    write_tiny_model(tmp_path / "model", characters=CHARACTERS)
    rows = [{"prompt": f"sort {place}", "label": place} for place in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "doctors_task.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("doctors_task", None)
    return tmp_path


def config(**sections: dict[str, Any]) -> Config:
    smallest: dict[str, dict[str, Any]] = {
        "data": {"path": "prompts.jsonl", "shuffle": False},
        "rollout": {"num_steps": 4, "groups_per_step": 2, "samples_per_group": 2},
        "reward": {"function": "doctors_task:reward", "num_workers": 1},
        "sampling": {"max_new_tokens": 8},
        "engine": {"model": "model", "max_concurrent_samples": 4},
    }
    names = smallest.keys() | sections.keys()
    return from_dict({name: smallest.get(name, {}) | sections.get(name, {}) for name in names})


def only(outcomes: list[CheckOutcome]) -> CheckOutcome:
    assert len(outcomes) == 1
    assert outcomes[0].fix or outcomes[0].status in (CheckStatus.OK, CheckStatus.SKIPPED)
    return outcomes[0]


def doctor(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    flags = [f"--{section}.{key}={json.dumps(value) if isinstance(value, list) else value}"
             for section, table in {"data": {"path": "prompts.jsonl"},
                                    "rollout": {"num_steps": 4, "groups_per_step": 2, "samples_per_group": 2},
                                    "reward": {"function": "doctors_task:reward"},
                                    "engine": {"model": "model"}}.items()
             for key, value in table.items()]  # fmt: skip
    command = [sys.executable, "-m", "fa_rollout.cli", "doctor", *flags, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


# --- the whole of it -------------------------------------------------------------------------------------


def test_a_run_that_would_work_is_well_with_an_engine_that_is_started_for_it(folder: Path) -> None:
    done = doctor(folder, "--json", "--", sys.executable, "train.py")
    found = {outcome["check"]: outcome for outcome in json.loads(done.stdout)}
    bad = [outcome for outcome in found.values() if outcome["status"] == "error"]
    assert (done.returncode, bad) == (0, []), done.stderr
    assert "a print of the user's" in done.stderr
    assert "yes" in found["engine"]["details"][1]
    assert found["spelling"]["status"] == "ok"
    assert "doctors_task:reward returned" in found["reward"]["text"]
    assert "'<bos>sort" in found["prompts"]["details"][0]
    started = [
        p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])
    ]
    assert not started


def test_everything_that_is_wrong_is_told_at_once_with_its_cure(folder: Path) -> None:
    words = ["--engine.urls", "127.0.0.1:9", "--patience", "100ms", "--data.path", "none.jsonl"]
    code = ("--reward.function=doctors_task:rewrd", "--rollout.filter=doctors_task:kep")
    done = doctor(folder, *words, *code, "--", "no-such-program")
    assert done.returncode == 2
    text = " ".join(done.stdout.split())
    for said in (
        "127.0.0.1:9",
        "none.jsonl",
        "did you mean 'reward'?",
        "did you mean 'keep'?",
        "no-such-program",
    ):
        assert said in text
    assert text.count("fix: ") == 5
    assert "5 errors, " in text


# --- engines ---------------------------------------------------------------------------------------------


@pytest.fixture
def scripted() -> Iterator[ScriptedEngine]:
    with ScriptedEngine.start(Script()) as engine:
        yield engine


def look(url: str, patience_s: float = 20.0) -> Examined | Unanswered:
    return asyncio.run(examine([url], router=False, patience_s=patience_s))[0]


@pytest.mark.parametrize(("protocol", "is_new"), [("0.5.15", False), ("0.5.23", True)])
def test_features_of_both_ages_of_the_protocol_are_found(protocol: Any, is_new: bool) -> None:
    with ScriptedEngine.start(Script(protocol=protocol)) as engine:
        found = look(engine.url)
        assert isinstance(found, Examined)
        assert (found.info.has_spans, found.has_brackets, found.can_pause) == (is_new, is_new, True)
        asked = {request.path for request in engine.requests() if request.method == "POST"}
        assert asked == {"/generate"}, "nothing about an engine is changed"
    outcome = only(engines.engines(config(), [found]))
    assert outcome.status is CheckStatus.OK
    assert (
        "during an update (retract)" if is_new else "are aborted by an update and then continue"
    ) in outcome.details[-1]
    outcome = only(engines.engines(config(engine={"pause_mode": "retract"}), [found]))
    assert outcome.status is (CheckStatus.OK if is_new else CheckStatus.WARNING)


def test_a_pause_of_somebody_elses_is_told_and_not_ended(scripted: ScriptedEngine) -> None:
    body = urllib.request.Request(f"{scripted.url}/pause_generation", data=b"{}", method="POST")
    body.add_header("Content-Type", "application/json")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(body, timeout=30).close()
    found = look(scripted.url, patience_s=1.0)
    assert isinstance(found, Unanswered)
    assert "pause" in found.text
    assert not scripted.requests("/continue_generation")


def test_an_engine_whose_tokenizer_is_another_is_found_by_its_spelling(
    folder: Path, scripted: ScriptedEngine
) -> None:
    scripted.configure(vocab_size=3 + len(CHARACTERS))
    done = doctor(folder, f"--engine.urls={scripted.url}", "--json", "--", sys.executable)
    found = {outcome["check"]: outcome for outcome in json.loads(done.stdout)}
    assert done.returncode == 2
    assert found["spelling"]["status"] == "error"
    assert "engine.tokenizer" in found["spelling"]["fix"]
    assert found["agreement"]["status"] == "skipped"


@pytest.mark.parametrize(("publish", "status"), [("disk", CheckStatus.OK), ("tensor", CheckStatus.ERROR)])
def test_an_engine_must_know_the_way_in_which_weights_come(publish: str, status: CheckStatus) -> None:
    info = EngineInfo(
        url="u", version_label=None, has_spans=True, model_path="m", server_version=None, vocab_size=None
    )
    one = Examined(info=info, probe_s=0.1, can_pause=True, update_ways=("files",), has_brackets=False)
    assert only(engines.engines(config(trainer={"publish": publish}), [one])).status is status


def test_weights_that_another_run_has_pushed_are_a_warning() -> None:
    info = EngineInfo(
        url="u", version_label="abcd:3", has_spans=True, model_path="m", server_version=None, vocab_size=None
    )
    one = Examined(info=info, probe_s=0.1, can_pause=True, update_ways=("files",), has_brackets=False)
    found = only(engines.engines(config(), [one]))
    assert found.status is CheckStatus.WARNING
    assert "another run has pushed these weights" in found.text


def test_engines_that_differ_are_told(folder: Path) -> None:
    def one(**changes: Any) -> Examined:
        plain = {"version_label": "default", "has_spans": True, "vocab_size": 40, "url": "u"}
        plain |= {"model_path": "m", "server_version": "0.5.23"}
        return Examined(
            info=EngineInfo(**(plain | changes)),
            probe_s=0.1,
            can_pause=True,
            update_ways=("files",),
            has_brackets=True,
        )

    assert len(engines.engines(config(), [one(), one()])) == 2
    assert "the same model" in engines.engines(config(), [one(), one(model_path="n")])[-1].text
    assert "0.5.15" in engines.engines(config(), [one(), one(server_version="0.5.15")])[-1].text


# --- model, data -----------------------------------------------------------------------------------------


def test_tokenizer_and_model_must_fit(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = model.tokenizer("model")
    assert tokenizer is not None
    smaller = write_tiny_model(tmp_path / "smaller", characters="0123")
    info = EngineInfo(
        url="u",
        version_label=None,
        has_spans=True,
        model_path=str(smaller),
        server_version=None,
        vocab_size=7,
    )
    assert "larger ids" in only(model.agreement(info, tokenizer)).text
    (smaller / "config.json").write_text('{"eos_token_id": [2, 39]}')
    info = EngineInfo(
        url="u",
        version_label=None,
        has_spans=True,
        model_path=str(smaller),
        server_version=None,
        vocab_size=40,
    )
    assert only(model.agreement(info, tokenizer)).status is CheckStatus.WARNING
    assert only(model.tokenizer("nowhere")[0]).status is CheckStatus.ERROR
    assert only(model.tokenizer(None)[0]).status is CheckStatus.ERROR


def shown(folder: Path, context: int | None = None, **sections: dict[str, Any]) -> list[CheckOutcome]:
    setting = config(**sections)
    _, source = prompts.data(setting)
    assert source is not None
    return prompts.prompts(setting, source, Tokenizer.load("model"), context)[0]


def test_prompts_that_are_too_long_are_counted(folder: Path) -> None:
    assert [one.status for one in shown(folder)] == [CheckStatus.OK] * 2
    late = shown(folder, data={"path": "prompts.jsonl", "max_prompt_tokens": 7})[-1]
    assert late.status is CheckStatus.ERROR
    assert "10 of 20 prompts (50.0%) are longer than data.max_prompt_tokens = 7" in late.text
    late = shown(folder, rollout={"max_failure_rate": 0.6}, data={"max_prompt_tokens": 7})[-1]
    assert late.status is CheckStatus.WARNING
    assert "the engines' context = 7" in shown(folder, context=9)[-1].text
    assert "6 tokens for its answer" in shown(folder, context=14)[-1].text


def test_prompts_come_in_the_order_in_which_they_are_sent(folder: Path) -> None:
    first = shown(folder, data={"shard": 1, "num_shards": 2})[0]
    assert [line.split(",")[0] for line in first.details[::2]] == ["row 1", "row 3", "row 5"]


def test_variables_of_the_chat_template_are_shown_or_named_where_they_have_no_effect(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if enable_thinking is false %}0{% endif %}"
    )
    off: dict[str, Any] = {"chat_template": True, "chat_template_kwargs": {"enable_thinking": False}}
    first, template, _ = shown(folder, data=off)
    assert "'sort 00'" in first.details[0]
    assert template.status is CheckStatus.OK
    misspelt = shown(folder, data=off | {"chat_template_kwargs": {"thinking": False}})[1]
    assert (misspelt.status, "'thinking'" in misspelt.text) == (CheckStatus.WARNING, True)
    text = shown(folder, data=off | {"chat_template": None})[1]
    assert (text.status, "prompts are text" in text.text) == (CheckStatus.WARNING, True)


def test_prompts_that_cannot_be_encoded_are_named(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").write_text("{{ raise_exception('of no use') }}")
    row = {"prompt": [{"role": "user", "content": "x"}]}
    (folder / "prompts.jsonl").write_text('{"prompt": "sort 1"}\n' + json.dumps(row))
    assert "of no use" in shown(folder)[-1].details[0]
    outcome = shown(folder, data={"chat_template": False})[0]
    assert outcome.status is CheckStatus.ERROR
    assert "data.chat_template" in outcome.text


def test_data_that_ends_too_soon_is_told(folder: Path) -> None:
    assert only(prompts.data(config(data={"epochs": 1}))[0]).status is CheckStatus.OK
    outcome = only(prompts.data(config(data={"epochs": 1}, rollout={"num_steps": 99}))[0])
    assert "data.epochs" in outcome.fix


# --- user code -------------------------------------------------------------------------------------------


def samples() -> list[Sample]:
    plain: dict[str, Any] = {"group": 0, "attempt": 0, "epoch": 0, "prompt_index": 0, "prompt": "p"}
    plain |= {"label": None, "metadata": {}, "response": "12", "prompt_ids": np.array([1], np.int32)}
    return [Sample(**plain, member=member) for member in range(2)]


def scored(**keys: Any) -> CheckOutcome:
    setting = config(reward=keys)
    return only(asyncio.run(user_code.reward(setting, samples())))


@pytest.mark.parametrize(
    ("keys", "status", "said"),
    [
        ({"function": "doctors_task:reward"}, CheckStatus.OK, "returned 2 for each of 2 samples"),
        ({"function": "doctors_task:parts", "key": "score"}, CheckStatus.OK, "1 (form 0.5)"),
        ({"function": "doctors_task:group", "group": True}, CheckStatus.OK, "returned 0, 1"),
        ({"function": "doctors_task:parts"}, CheckStatus.ERROR, "reward.key"),
        ({"function": "doctors_task:raises"}, CheckStatus.ERROR, "no answer"),
        ({"function": "doctors_task:text"}, CheckStatus.ERROR, "must be a number"),
        ({"function": "doctors_task:endless", "timeout_s": 0.2}, CheckStatus.ERROR, "timeout"),
        ({"function": "doctors_task:nothing"}, CheckStatus.ERROR, "no attribute 'nothing'"),
        ({"function": "doctors_task:slow", "in_loop": True}, CheckStatus.WARNING, "in the event loop"),
        ({"function": "doctors_task:slow"}, CheckStatus.OK, "workers"),
    ],
)
def test_a_reward_is_called_as_a_run_calls_it(
    folder: Path, keys: dict[str, Any], status: CheckStatus, said: str
) -> None:
    outcome = scored(**keys)
    assert (outcome.status, said in outcome.text) == (status, True), outcome


def test_a_reward_is_imported_even_without_a_sample(folder: Path) -> None:
    assert only(asyncio.run(user_code.reward(config(), []))).status is CheckStatus.SKIPPED
    broken = config(reward={"function": "doctors_task:nothing"})
    assert only(asyncio.run(user_code.reward(broken, []))).status is CheckStatus.ERROR


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("doctors_task:keep", CheckStatus.OK, "kept"),
        ("zero_variance", CheckStatus.OK, "rejected (no sample has a reward)"),
        ("doctors_task:keep_badly", CheckStatus.ERROR, "must return a bool"),
        ("doctors_task:nothing", CheckStatus.ERROR, "no attribute"),
    ],
)
def test_a_filter_judges_a_group(folder: Path, path: str, status: CheckStatus, said: str) -> None:
    outcome = only(user_code.group_filter(config(rollout={"filter": path}), samples()))
    assert (outcome.status, said in outcome.text) == (status, True), outcome


def test_a_generate_must_be_async(folder: Path) -> None:
    assert user_code.generate(config()) == []
    path = {"generate": "doctors_task:generate"}
    assert only(user_code.generate(config(rollout=path))).status is CheckStatus.OK
    outcome = only(user_code.generate(config(rollout={"generate": "doctors_task:keep"})))
    assert "async" in outcome.fix


# --- machine ---------------------------------------------------------------------------------------------


def test_the_machine_is_looked_at(folder: Path) -> None:
    assert only(machine.memory(config(ring={"bytes": 1 << 50}))).status is CheckStatus.ERROR
    assert only(machine.memory(config(ring={"bytes": "1MiB"}))).status is CheckStatus.OK
    assert only(machine.shared_memory(folder / "none")).status is CheckStatus.WARNING
    assert (
        only(machine.descriptors(config(engine={"max_concurrent_samples": 1 << 30}))).status
        is CheckStatus.ERROR
    )
    assert only(machine.proxies(["http://far:1"], {"http_proxy": "p"})).status is CheckStatus.WARNING
    assert only(machine.clock()).status is CheckStatus.OK
    assert only(machine.programs(["no-such-program"])).status is CheckStatus.ERROR
    assert "numpy" in only(machine.packages()).details[0]


def test_a_folder_that_takes_no_files_is_an_error_and_none_is_made(folder: Path) -> None:
    assert only(machine.output(config(run={"output_dir": "/proc/none/out"}))).status is CheckStatus.ERROR
    assert only(machine.output(config(run={"output_dir": "new/out"}))).status is CheckStatus.OK
    assert not os.path.exists("new")
    assert only(machine.output(config())).status is CheckStatus.SKIPPED


@pytest.mark.parametrize(("number", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB")])
def test_sizes_are_read_by_people(number: int, text: str) -> None:
    assert machine.size(number) == text
