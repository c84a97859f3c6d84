"""Secrets never stand in what is written of a run or shown of it."""

import pytest

from fa_rollout.process.masking import masked, masked_text, masked_words


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "S3CRET", "--tp", "2"], ["--api-key", "***", "--tp", "2"]),
        (["--api-key=S3CRET"], ["--api-key=***"]),
        (["--hf-token", "S3CRET"], ["--hf-token", "***"]),
        (
            ["--control-plane-api-keys", "a:S3CRET", "b:S3CRET", "--x", "y"],
            ["--control-plane-api-keys", "***", "***", "--x", "y"],
        ),
        (["--max-total-tokens", "32768"], ["--max-total-tokens", "32768"]),
        (["--tokenizer-path", "/models/x"], ["--tokenizer-path", "/models/x"]),
        (["env", "HF_TOKEN=S3CRET", "serve"], ["env", "HF_TOKEN=***", "serve"]),
        (["--header", "Authorization: Bearer S3CRET"], ["--header", "Authorization:***"]),
        (['{"api_key": "S3CRET", "port": 1}'], ['{"api_key": "***", "port": 1}']),
        (['{"apiKey":"S3CRET"}'], ['{"apiKey":"***"}']),
        (["--model", "s3://user:S3CRET@host/x"], ["--model", "s3://***@host/x"]),
    ],
)
def test_words(words: list[str], shown: list[str]) -> None:
    found = masked_words(words)
    assert "S3CRET" not in " ".join(found)
    if "Authorization" not in " ".join(words):
        assert found == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:S3CRET@host:1/a?b=1", "http://***@host:1/a?b=***"),
        ("http://S3CRET@host", "http://***@host"),
        ("https://h/score?token=S3CRET&model=x", "https://h/score?token=***&model=***"),
        ("https://h/score?S3CRET", "https://h/score?***"),
        ("asked 'http://u:S3CRET@h/' and got 401", "asked 'http://***@h/' and got 401"),
        ("Authorization: Bearer S3CRET", "Authorization: Bearer ***"),
        ("/data/what?.jsonl", "/data/what?.jsonl"),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("mail a@b.c about it", "mail a@b.c about it"),
    ],
)
def test_text(text: str, shown: str) -> None:
    assert masked_text(text) == shown


def test_a_configuration() -> None:
    tree = {
        "launch": {
            "environment": {"HF_TOKEN": "S3CRET", "NAME": "S3CRET"},
            "arguments": ["--api-key", "S3CRET"],
            "number": 2,
        },
        "reward": {"function": "https://u:S3CRET@h/p?key=S3CRET", "group": False},
        "engine": {"urls": ["http://h:1"]},
        "evaluation": {"datasets": {"a": "s3://u:S3CRET@b/c"}, "sampling": {"temperature": 0}},
        "record": {"columns": [{"name": "x", "shape": [1, 2]}]},
    }
    shown = masked(tree)
    assert "S3CRET" not in repr(shown)
    assert tree["launch"]["environment"]["NAME"] == "S3CRET", "the run itself keeps them"
    assert shown["launch"]["environment"] == {"HF_TOKEN": "***", "NAME": "***"}
    assert shown["engine"] == tree["engine"]
    assert shown["record"] == tree["record"]
    assert shown["launch"]["number"] == 2
    assert masked(shown) == shown
