"""The tokenizer gives what transformers gives for the same folder."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fa_rollout.config import ConfigError
from fa_rollout.data.chat import PromptError
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer

CHATML = """{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'banned' %}{{ raise_exception('no ' + message['role']) }}{% endif %}
    {%- if message.name is defined %}({{ message.name }}){% endif %}
    {%- generation %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
    {%- endgeneration %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEXTS = [
    "Hello, world!",
    "  two  spaces ",
    "naïve café 数学 🙂",
    "a<|im_end|>b",
    "line\nline\r\n\ttab",
    "don't . stop",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2 + 2? <b>&</b> ", "name": None},
]
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"a": "<int>", "flag": True}}}]


def byte_level(post_processor: str | None = "template") -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    if post_processor == "template":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def folder_with(tmp_path: Path, backend: tokenizers.Tokenizer, settings: dict, **files: object) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def row(prompt: object, tools: list | None = None) -> Row:
    return Row(prompt=prompt, label=None, metadata={}, tools=tools)  # type: ignore[arg-type]


def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


CONFIGS = {
    "plain": ("template", {"bos_token": "<s>", "eos_token": "</s>"}),
    "described tokens": (
        "template",
        {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        },
    ),
    "no post-processor": (None, {"eos_token": "</s>"}),
    "the file's post-processor stands, whatever the config says": (
        "template",
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True},
    ),
    "token that only the config names": ("template", {"eos_token": "</s>", "pad_token": "<pad>"}),
    "added tokens that only the config names": (
        "template",
        {
            "eos_token": "</s>",
            "added_tokens_decoder": {
                "400": {"content": "<think>", "special": False, "normalized": False, "lstrip": False,
                        "rstrip": False, "single_word": False}
            },
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_text_chat_and_decoding_equal_transformers(name: str, tmp_path: Path) -> None:
    post_processor, config = CONFIGS[name]
    folder = folder_with(tmp_path, byte_level(post_processor), {**config, "chat_template": CHATML})
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for text in [*TEXTS, "<think>5</think><pad>"]:
        ids = ours.encode_prompt(row(text))
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs(text)["input_ids"], text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        wrapped = theirs.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        assert ours.encode_prompt(row(text), chat_template=True).tolist() == wrapped["input_ids"]
    for tools in (None, TOOLS, []):
        expected = theirs.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
        for asked in (None, True):
            assert ours.encode_prompt(row(CHAT, tools), chat_template=asked).tolist() == expected
    assert ours.vocab_size == len(theirs)
    assert theirs.eos_token_id in ours.eos_ids


def test_truncation_and_padding_of_the_file_never_reach_a_prompt(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    ours = Tokenizer.load(folder_with(tmp_path, backend, {}))
    assert (
        ours.decode(ours.encode_prompt(row("a longer text than four tokens")))
        == "a longer text than four tokens"
    )


def test_named_templates_the_one_for_tools_is_used_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": CHATML},
        {
            "name": "tool_use",
            "template": "{{ bos_token }}T{{ tools | tojson(indent=2) }}{{ strftime_now('%Y')[:1] }}",
        },
    ]
    folder = folder_with(tmp_path, byte_level(), {"bos_token": "<s>", "chat_template": named})
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
        assert ours.encode_prompt(row(CHAT, tools)).tolist() == expected


@pytest.mark.parametrize(
    "switches", [{}, {"enable_thinking": False}, {"enable_thinking": True, "bos_token": "B"}]
)
def test_a_templates_own_switches_reach_it_as_transformers_would_hand_them_over(
    tmp_path: Path, switches: dict[str, object]
) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    folder = folder_with(tmp_path, byte_level(), {"bos_token": "<s>", "chat_template": template})
    ours, theirs = Tokenizer.load(folder), reference(folder)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, **switches)["input_ids"]
    asked = Row(prompt=CHAT, label=None, metadata={}, tools=None, chat_template_kwargs=switches)
    assert ours.encode_prompt(asked).tolist() == expected
    assert ours.unused_by_template(["enable_thinking", "enable_thinkin"]) == ["enable_thinkin"]


def test_a_null_inside_a_message_reaches_the_template_as_it_reaches_that_of_transformers(
    tmp_path: Path,
) -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
    folder = folder_with(tmp_path, byte_level(), {"chat_template": template})
    ours, theirs = Tokenizer.load(folder), reference(folder)
    call = {"function": {"name": "f", "arguments": {"a": None}}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "object", "properties": {"a": {"default": None, "enum": [None, 1]}}}]
    expected = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=True)["input_ids"]
    assert ours.encode_prompt(row(chat, tools)).tolist() == expected


def test_template_files_win_over_the_configuration(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level(), {"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }}")
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True)["input_ids"]
        assert ours.encode_prompt(row(CHAT, tools)).tolist() == expected
    assert ours.decode(ours.encode_prompt(row(CHAT))).startswith("[Be brief.]")


def test_every_id_that_a_model_file_calls_an_end_is_one(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        byte_level(),
        {"eos_token": "</s>"},
        config={"eos_token_id": 3, "text_config": {"eos_token_id": [9, 3]}},
        generation_config={"eos_token_id": [1, 7]},
    )
    assert Tokenizer.load(folder).eos_ids == (1, 3, 7, 9)


def test_a_tokenizer_without_any_end_has_no_eos_ids(tmp_path: Path) -> None:
    assert Tokenizer.load(folder_with(tmp_path, byte_level(), {})).eos_ids == ()


def test_a_message_that_the_template_refuses_is_the_prompts_fault_and_names_the_reason(
    tmp_path: Path,
) -> None:
    ours = Tokenizer.load(folder_with(tmp_path, byte_level(), {"chat_template": CHATML}))
    with pytest.raises(PromptError, match="TemplateError: no banned"):
        ours.encode_prompt(row([{"role": "banned", "content": ""}]))
    with pytest.raises(PromptError, match=r"UndefinedError.*role"):
        ours.encode_prompt(row([{"content": "x"}]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_can_neither_change_its_input_nor_leave_the_sandbox(template: str, tmp_path: Path) -> None:
    ours = Tokenizer.load(folder_with(tmp_path, byte_level(), {"chat_template": template}))
    with pytest.raises(PromptError, match="SecurityError"):
        ours.encode_prompt(row(CHAT))


def test_text_that_has_no_tokens_or_is_no_unicode_is_the_prompts_fault(tmp_path: Path) -> None:
    ours = Tokenizer.load(folder_with(tmp_path, byte_level(None), {}))
    for text in ("", "\ud800"):
        with pytest.raises(PromptError):
            ours.encode_prompt(row(text))


def test_messages_without_a_usable_template_are_a_configuration_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level(), {})
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        Tokenizer.load(folder).encode_prompt(row(CHAT))
    with pytest.raises(ConfigError, match=r"data\.chat_template = false"):
        Tokenizer.load(folder).encode_prompt(row(CHAT), chat_template=False)
    with pytest.raises(ConfigError, match="not valid"):
        Tokenizer.load(folder_with(tmp_path, byte_level(), {"chat_template": "{% if %}"}))


def test_a_folder_without_a_tokenizer_is_named_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read by the installed tokenizers"):
        Tokenizer.load(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json must be JSON"):
        Tokenizer.load(tmp_path)


def test_encoding_leaves_no_threads_that_a_fork_would_warn_of_and_needs_no_transformers(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, byte_level(), {"chat_template": CHATML})
    code = f"""
        import os, sys
        from fa_rollout.data.row import Row
        from fa_rollout.data.tokenizer import Tokenizer
        tokenizer = Tokenizer.load({str(folder)!r})
        for prompt in ("x " * 9999, {CHAT!r}):
            tokenizer.encode_prompt(Row(prompt=prompt, label=None, metadata={{}}, tools=None))
        if not (pid := os.fork()):
            tokenizer.decode(tokenizer.encode_prompt(Row(prompt="y", label=None, metadata={{}}, tools=None)))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert not {{"transformers", "torch", "pyarrow"}} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
