"""What a run wrote, read back: every trained sample with its step, every untrained group with its reason."""

import io
import json
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
from rich.console import Console

from fa_rollout.cli import main
from fa_rollout.records.folder import launches, tokenizer_of
from fa_rollout.records.history import History
from fa_rollout.records.samples import Choice, Fate, select
from fa_rollout.records.view import show
from tests.records import user_code
from tests.records.conftest import GROUPS_PER_STEP, NUM_STEPS, SAMPLES_PER_GROUP, Recorded

pytestmark = pytest.mark.slow


def listed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["samples", str(folder), "--json", "--limit", "100000", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_trained_sample_is_there_as_the_trainer_saw_it(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, recorded.folder, "--trained")
    places = {(s["step"], s["version"], s["group"], s["member"]) for s in found}
    assert places == set(recorded.trained)
    assert len(found) == NUM_STEPS * GROUPS_PER_STEP * SAMPLES_PER_GROUP
    for sample in found:
        name = (sample["group"], sample["member"])
        assert sample["reward"] == pytest.approx(recorded.rewards[name])
        assert sample["response_ids"] == recorded.responses[name]
        assert sample["staleness"] == sample["version"] - min(v for v, _ in sample["version_spans"])


def test_each_kind_of_end_is_there_with_its_reason_and_adds_up(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = recorded.events[-1]["counts"]
    failed = listed(capsys, recorded.folder, "--failed")
    filtered = listed(capsys, recorded.folder, "--filtered")
    assert len({sample["group"] for sample in failed}) == counts["failed"] > 0
    assert len({sample["group"] for sample in filtered}) == counts["filtered"] > 0
    assert all("this prompt cannot be answered" in sample["reason"] for sample in failed)
    assert all("keep returned False" in sample["reason"] for sample in filtered)
    known = [sample for sample in filtered if sample["member"] is not None]
    assert {sample["prompt_index"] for sample in known} == {user_code.IS_FILTERED}
    assert all(sample["response"] for sample in known)


def test_tool_tokens_are_masked_and_their_text_is_the_tools(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    users = [s for s in listed(capsys, recorded.folder) if s["prompt_index"] == user_code.USES_A_TOOL]
    assert users
    for sample in users:
        ((start, end),) = sample["masked_spans"]
        assert end - start == len(user_code.TOOL_OUTPUT)
    out = io.StringIO()
    history = launches(recorded.folder)[-1]
    chosen = select(recorded.folder, history, Choice(group=users[0]["group"]))
    console = Console(file=out, width=100)
    show(console, chosen, tokenizer_of(history, None), is_full=True)
    assert f"⟦{user_code.TOOL_OUTPUT}⟧" in out.getvalue()


def test_a_tokenizer_is_found_from_any_folder(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = launches(recorded.folder)[-1]
    assert Path(history.folder) == Path.cwd(), "where the run was started"
    whole = Path(history.config["engine"]["tokenizer"])
    relative = History(folder=str(whole.parent), config={"engine": {"tokenizer": whole.name}})
    monkeypatch.chdir(tmp_path)
    assert list(tokenizer_of(relative, None).encode("a1")) == list(tokenizer_of(history, None).encode("a1"))


def test_orders_and_filters_hold(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    def column(name: str, *words: str) -> list[Any]:
        return [sample[name] for sample in listed(capsys, recorded.folder, *words)]

    rewards = column("reward", "--worst")
    assert rewards == sorted(rewards)
    assert column("reward", "--best") == rewards[::-1]
    stale = column("staleness", "--stale")
    assert stale == sorted(stale, reverse=True)
    lengths = [len(ids) for ids in column("response_ids", "--longest")]
    assert lengths == sorted(lengths, reverse=True)
    assert set(column("step", "--step", "2")) == {2}
    (group,) = set(column("group", "--group", "8"))
    assert group == 8
    assert main(["samples", str(recorded.folder), "--limit", "3", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_reward_parts_and_rewards_agree(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    for sample in listed(capsys, recorded.folder, "--trained"):
        assert sample["reward"] == pytest.approx(sum(sample["reward_parts"].values()) / 2)


def test_the_samples_of_a_step_are_shown_on_a_terminal(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(recorded.folder), "--step", "1", "--limit", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("step 1 by version 1") == 2
    assert "prompt" in text


def test_a_log_that_a_kill_cut_anywhere_is_read_up_to_there(recorded: Recorded, tmp_path: Path) -> None:
    history = launches(recorded.folder)[-1]
    (tmp_path / "samples").mkdir()
    source = max((recorded.folder / "samples").iterdir(), key=lambda path: path.stat().st_size)
    data = source.read_bytes()
    counts = []
    for length in range(0, len(data) + 1, 61):
        (tmp_path / "samples" / source.name).write_bytes(data[:length])
        choice = Choice(limit=10**6, fates=frozenset({Fate.TRAINED}))
        counts.append(len(select(tmp_path, history, choice)))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= (NUM_STEPS - 4) * GROUPS_PER_STEP * SAMPLES_PER_GROUP


def test_a_folder_without_records_is_refused_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["samples", str(tmp_path)])
    assert end.value.code == 2
    assert "run.output_dir" in capsys.readouterr().err


class _Hostile:
    """A tokenizer of a model that writes what a terminal obeys."""

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str:
        return "\x1b]0;owned\x07\r\u202eabc\n"


def test_what_a_model_wrote_cannot_act_on_the_terminal(recorded: Recorded) -> None:
    history = launches(recorded.folder)[-1]
    out = io.StringIO()
    show(Console(file=out, width=100), select(recorded.folder, history, Choice()), _Hostile(), is_full=True)
    assert "\\x1b]0;owned\\x07\\r\\u202eabc" in out.getvalue()
    assert all(line.isprintable() for line in out.getvalue().split("\n"))
