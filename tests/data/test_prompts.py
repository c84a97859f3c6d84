"""Every row of the data arrives as it was written, or the start fails and says where and why."""

import json
import logging
import sys
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from fa_rollout import config
from fa_rollout.config import ConfigError
from fa_rollout.data.prompts import PromptSource

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None}]
TOOLS = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": {"required": ["a"]}}}]


def opened(path: Path | str, **options: Any) -> PromptSource:
    return PromptSource.open(config.Data(path=str(path), **options))


def jsonl(path: Path, *lines: Any) -> Path:
    texts = [
        line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines
    ]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def parquet(path: Path, table: pa.Table | dict[str, Any], **options: Any) -> Path:
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


def prompts(source: PromptSource) -> list[Any]:
    return [source.row(index).prompt for index in range(len(source))]


def test_jsonl_with_byte_order_mark_blank_lines_and_carriage_returns_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n   \n{"prompt": "tw\xc3\xb6"}\n\n{"prompt": "three"}'
    )
    source = opened(path)
    assert prompts(source) == ["one", "twö", "three"]
    assert source.num_skipped_rows == 0


@pytest.mark.parametrize(
    "label", [4, 4.5, "4", True, None, [1, [2, None]], {"a": {"b": False}}, 2**64 - 1, -(2**63), ""]
)
def test_labels_and_metadata_keep_their_types(label: Any, tmp_path: Path) -> None:
    row = opened(jsonl(tmp_path / "a.jsonl", {"prompt": CHAT, "label": label, "extra": label})).row(0)
    assert (row.prompt, row.label, row.metadata) == (CHAT, label, {"extra": label})
    assert type(row.label) is type(label)


def test_metadata_is_every_other_column_or_the_named_ones_and_each_read_is_fresh(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"q": "x", "a": 1, "b": [2], "c": 3}, {"q": "y", "a": 2})
    everything = opened(path, prompt_key="q", label_key="a")
    assert everything.row(0).metadata == {"b": [2], "c": 3}
    everything.row(0).metadata["b"].append(9)
    assert everything.row(0).metadata == {"b": [2], "c": 3}
    named = opened(path, prompt_key="q", label_key=None, metadata_keys=["c"])
    assert (named.row(0).metadata, named.row(1).metadata, named.row(0).label) == ({"c": 3}, {}, None)


def test_a_whole_number_that_is_too_long_counts_only_where_it_is_used(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": str(10**30), "label": 1, "unused": 2**70})
    assert opened(path, metadata_keys=[]).row(0).label == 1


def test_tools_are_lists_of_objects_or_json_text_of_one(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "tools": tools} for tools in (TOOLS, json.dumps(TOOLS), None)]
    source = opened(jsonl(tmp_path / "a.jsonl", *rows), tools_key="tools")
    assert [source.row(index).tools for index in range(3)] == [TOOLS, TOOLS, None]
    assert source.row(0).metadata == {}


BAD_LINES = {
    b"42": "must be a JSON object, found int",
    b"[1]": "must be a JSON object, found list",
    b"null": "must be a JSON object, found null",
    b'{"prompt": "cut of': "truncated",
    b'{"prompt": "a"} {"prompt": "b"}': "trailing",
    b'{"prompt": "\xff"}': "utf-8|UTF-8",
    b"prompt": "one JSON object",
    b'{"prompt": ' + b"[" * 100_000: "recursion depth",
    b'{"question": "a", "answer": 1}': r"no prompt: key 'prompt' is not among its keys 'question', 'answer'",
    b'{"prompt": 3}': "text or a list of chat messages.*found int",
    b'{"prompt": null}': "found null",
    b'{"prompt": ""}': "empty str",
    b'{"prompt": []}': "empty list",
    b'{"prompt": ["a"]}': "list that holds str",
    b'{"prompt": "a", "label": 18446744073709551616}': "write it as text",
    b'{"prompt": "a", "label": "1", "more": [[-9223372036854775809]]}': "write it as text",
    b'{"prompt": "a", "tools": {"x": 1}}': "tools must be a list of objects, found dict",
    b'{"prompt": "a", "tools": "[1"}': "tools given as text must be JSON",
    b'{"prompt": "a", "tools": "[1]"}': "tools must be a list",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:60].decode(errors="replace"))
def test_a_bad_line_stops_the_start_with_file_and_line_or_is_counted_and_logged(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "first", "tools": None}, b"", line, {"prompt": "last"})
    with pytest.raises(
        ConfigError, match=rf"bad row at .*a\.jsonl:3: .*({BAD_LINES[line]})(.|\n)*on_bad_row"
    ):
        opened(path, tools_key="tools")
    with caplog.at_level(logging.WARNING):
        source = opened(path, tools_key="tools", on_bad_row="skip")
    assert prompts(source) == ["first", "last"]
    assert source.num_skipped_rows == 1
    assert "a.jsonl:3" in caplog.text
    assert "num_skipped=1 num_rows=2" in caplog.text


def test_many_bad_rows_are_all_counted_and_the_first_few_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[b"x"] * 100, {"prompt": "good"})
    assert opened(path, on_bad_row="skip").num_skipped_rows == 100
    assert caplog.text.count("row skipped place=") == 5
    assert "num_skipped=100" in caplog.text


def test_a_line_of_twenty_megabytes_is_a_row(tmp_path: Path) -> None:
    big = "ä" * 10_000_000
    source = opened(
        jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": big, "label": 1}, {"prompt": "y"})
    )
    assert source.row(1).prompt == big
    assert prompts(source)[::2] == ["x", "y"]


def test_several_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        jsonl(tmp_path / f"{name}.jsonl", *[{"prompt": f"{name}{i}"} for i in range(3)])
    parquet(tmp_path / "bb.parquet", {"prompt": ["p0", "p1"]})
    (tmp_path / "sub").mkdir()
    source = opened(tmp_path / "*")
    assert prompts(source) == ["a0", "a1", "a2", "b0", "b1", "b2", "p0", "p1", "c0", "c1", "c2"]
    jsonl(tmp_path / "sub" / "d.jsonl", {"prompt": "d"})
    assert prompts(opened(tmp_path / "**" / "[cd].jsonl"))[-1] == "d"


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "a[1].jsonl", {"prompt": "right"})
    jsonl(tmp_path / "a1.jsonl", {"prompt": "wrong"})
    assert prompts(opened(tmp_path / "a[1].jsonl")) == ["right"]


def test_data_without_any_prompt_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    jsonl(tmp_path / "full.jsonl", {"prompt": "x"})
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf\n\n")
    jsonl(tmp_path / "bad.jsonl", b"x", b"y")
    parquet(tmp_path / "none.parquet", {"prompt": pa.array([], pa.string())})
    for pattern in ("empty.jsonl", "[ef]*.jsonl"):
        with pytest.raises(ConfigError, match=r"empty\.jsonl is empty \(0 bytes\)"):
            opened(tmp_path / pattern)
    for name in ("bom.jsonl", "none.parquet"):
        with pytest.raises(ConfigError, match="must hold at least one prompt; found none"):
            opened(tmp_path / name)
    with pytest.raises(ConfigError, match=r"found none \(2 bad rows were skipped\)"):
        opened(tmp_path / "bad.jsonl", on_bad_row="skip")


def test_paths_that_lead_to_no_data_say_what_is_accepted(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.json", {"prompt": "x"})
    for path, says in {
        "nothing.jsonl": "matches no file",
        "*.jsonl": "matches no file",
        ".": r"found the folder .*/\*\.jsonl",
        "a.json": r"must end in '\.jsonl', '\.ndjson', '\.parquet'",
    }.items():
        with pytest.raises(ConfigError, match=says):
            opened(tmp_path / path)


def test_a_key_that_no_row_has_is_an_error_but_labels_may_be_absent(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "answer": 1})
    assert opened(path).row(0).label is None
    for options in ({"label_key": "anwser"}, {"metadata_keys": ["anwser"]}, {"tools_key": "anwser"}):
        with pytest.raises(ConfigError, match="'anwser', which no row has; found 'answer', 'prompt'"):
            opened(path, **options)


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"}))
    with (tmp_path / "a.jsonl").open("r+b") as file:
        file.truncate(20)
    assert source.row(0).prompt == "x"
    with pytest.raises(ConfigError, match="must not change during a run"):
        source.row(1)


def test_rows_stay_in_the_file_until_they_are_asked_for(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", *[{"prompt": "x" * 1000}] * 1000))
    (file,) = source._files
    held = sum(sys.getsizeof(value) for value in vars(file).values())
    assert held < 100_000
    source.close()
    source.close()


def test_parquet_rows_are_plain_python_at_any_depth(tmp_path: Path) -> None:
    rows = {
        "prompt": [CHAT, CHAT[:1]],
        "tools": [TOOLS, None],
        "label": [[1, 2], [3]],
        "flags": [{"a": {"b": [True, False]}}, {"a": {"b": []}}],
    }
    source = opened(parquet(tmp_path / "a.parquet", rows), tools_key="tools")
    first, second = source.row(0), source.row(1)
    assert (first.prompt, first.tools, first.label) == ([CHAT[0], {"role": "assistant"}], TOOLS, [1, 2])
    assert first.metadata == {"flags": {"a": {"b": [True, False]}}}
    assert first.metadata["flags"]["a"]["b"][0] is True
    assert (second.prompt, second.tools, second.label) == (CHAT[:1], None, [3])
    assert type(first.prompt) is list
    assert type(first.prompt[0]) is dict


@pytest.mark.parametrize("label", [3, 0.5, True, "x", None, [True], {"a": 1}])
def test_parquet_labels_keep_their_types(label: Any, tmp_path: Path) -> None:
    row = opened(parquet(tmp_path / "a.parquet", {"prompt": ["x"], "label": [label]})).row(0)
    assert row.label == label
    assert type(row.label) is type(label)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a"]),
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.chunked_array([["a"], ["b", "a"]]),
        pa.array(["a", "b", "a"], pa.string_view()),
    ],
    ids=lambda column: str(column.type),
)
def test_parquet_text_of_every_encoding_is_text(column: Any, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", pa.table({"prompt": column, "label": column}), row_group_size=2)
    source = opened(path)
    assert prompts(source) == ["a", "b", "a"]
    assert source.row(2).label == "a"


def test_parquet_maps_are_dicts(tmp_path: Path) -> None:
    column = pa.array([[("k", 1), ("l", 2)]], pa.map_(pa.string(), pa.int64()))
    source = opened(parquet(tmp_path / "a.parquet", pa.table({"prompt": ["x"], "m": column})))
    assert source.row(0).metadata == {"m": {"k": 1, "l": 2}}


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array(["x", None, "y"]), "found null"),
        (pa.array(["x", "", "y"]), "empty str"),
        (pa.array([CHAT, None, CHAT]), "found null"),
        (pa.array([CHAT, [], CHAT]), "empty list"),
        (pa.array([CHAT, [None], CHAT]), "list that holds null"),
        (pa.array(["x", None, "y"]).dictionary_encode(), "found null"),
        (pa.array(["x", None, "y"], pa.large_string()), "found null"),
    ],
)
def test_a_bad_parquet_row_stops_the_start_with_its_number_or_is_counted(
    column: Any, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = parquet(tmp_path / "a.parquet", pa.table({"prompt": column, "label": [0, 1, 2]}))
    with pytest.raises(ConfigError, match=rf"a\.parquet: row 1: .*{says}"):
        opened(path)
    source = opened(path, on_bad_row="skip")
    assert (source.num_skipped_rows, [source.row(i).label for i in range(len(source))]) == (1, [0, 2])
    assert "row 1" in caplog.text


def test_bad_tools_in_parquet_are_found_at_start(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"prompt": ["x", "y"], "tools": [json.dumps(TOOLS), "[1"]})
    with pytest.raises(ConfigError, match="row 1: tools given as text"):
        opened(path, tools_key="tools")
    assert opened(path, tools_key="tools", on_bad_row="skip").row(0).tools == TOOLS


def test_parquet_of_the_wrong_shape_names_its_columns_or_types(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"question": ["x"], "answer": [1]})
    with pytest.raises(ConfigError, match=r"data\.prompt_key = 'prompt' .* 'question', 'answer'"):
        opened(path)
    with pytest.raises(ConfigError, match=r"row 0: 'answer' must be text.*found int"):
        opened(path, prompt_key="answer")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet must be a Parquet file"):
        opened(tmp_path / "b.parquet")


def test_folder_names_never_become_columns_of_parquet(tmp_path: Path) -> None:
    (tmp_path / "split=train").mkdir()
    path = parquet(tmp_path / "split=train" / "a.parquet", {"prompt": ["x"], "b": [1]})
    assert opened(path).row(0).metadata == {"b": 1}


def test_only_named_parquet_columns_are_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"prompt": ["x"], "label": [1], "b": [2], "c": [3]})
    source = opened(path, metadata_keys=["b"])
    assert source.row(0).metadata == {"b": 2}
    assert source._files[0].keys == {"prompt", "label", "b"}
    assert opened(path, metadata_keys=[]).row(0).metadata == {}
    assert opened(path, metadata_keys=[])._files[0].keys == {"prompt", "label"}


@pytest.mark.parametrize("name", ["prompt", "label"])
def test_text_of_parquet_that_is_no_utf8_makes_a_bad_row(tmp_path: Path, name: str) -> None:
    options = pc.CastOptions(target_type=pa.string(), allow_invalid_utf8=True)
    text = pc.cast(pa.array([b"a", b"\xff", b"c"], pa.binary()), options=options)
    path = parquet(
        tmp_path / "a.parquet", {"prompt": ["x", "y", "z"], "label": ["a", "b", "c"]} | {name: text}
    )
    with pytest.raises(ConfigError, match=f"row 1: column '{name}': text must be UTF-8"):
        opened(path)
    assert len(opened(path, on_bad_row="skip")) == 2


def test_times_of_parquet_are_python_times_whatever_their_unit(tmp_path: Path) -> None:
    column = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))
    row = opened(parquet(tmp_path / "a.parquet", pa.table({"prompt": ["x"], "when": column}))).row(0)
    assert row.metadata == {"when": datetime(2023, 11, 14, 22, 13, 20, 123456)}
    assert type(row.metadata["when"]) is datetime


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (pa.time64("ns"), 1_500_000_001, time(0, 0, 1, 500_000)),
        (pa.duration("ns"), 1_500_000_001, timedelta(seconds=1.5)),
        (
            pa.struct({"at": pa.list_(pa.duration("ns"))}),
            {"at": [1_001]},
            {"at": [timedelta(microseconds=1)]},
        ),
        (pa.large_list(pa.time64("ns")), [1_001], [time(microsecond=1)]),
        (pa.list_(pa.time64("ns"), 1), [1_001], [time(microsecond=1)]),
        (pa.map_(pa.string(), pa.time64("ns")), [("a", 1_001)], {"a": time(microsecond=1)}),
    ],
    ids=str,
)
def test_nanoseconds_of_any_kind_and_depth_become_microseconds(
    tmp_path: Path, kind: pa.DataType, value: Any, found: Any
) -> None:
    table = pa.table({"prompt": ["x"], "when": pa.array([value], kind)})
    assert opened(parquet(tmp_path / "a.parquet", table)).row(0).metadata == {"when": found}


def test_without_pyarrow_parquet_names_the_extra_and_jsonl_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "a.parquet", {"prompt": ["x"]})
    jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'fa-rollout\[parquet\]'"):
        opened(path)
    assert prompts(opened(tmp_path / "a.jsonl")) == ["x"]


SCHEMAS = [
    {
        "name": "find",
        "parameters": {
            "properties": {
                "at": {"type": "array", "item": {"type": "string"}},
                "default": {"type": "string", "enum": ["a", None]},
            }
        },
    },
    {"name": "pick", "parameters": {"properties": {"at": {"type": "string", "default": None}}}},
    {"name": "none", "parameters": {"properties": {}}, "const": None},
]


def test_parquets_padding_is_not_in_any_nested_value_and_nulls_that_mean_something_are(
    tmp_path: Path,
) -> None:
    chats = [[{"role": "user", "content": "x"}], [{"role": "tool", "content": "y", "name": "pick"}]]
    extra = [{"a": [{"x": 1}, {"y": [None, 2]}]}, {"b": None}]
    rows = {"prompt": chats, "tools": [SCHEMAS[:1], SCHEMAS[1:]], "label": extra, "more": extra}
    path = parquet(tmp_path / "a.parquet", rows)
    source = opened(path, tools_key="tools")
    first, second = source.row(0), source.row(1)
    assert [first.prompt, second.prompt] == chats
    find = SCHEMAS[0]["parameters"]["properties"]  # type: ignore[index]
    assert first.tools == [
        {
            "name": "find",
            "parameters": {
                # What `default` may hold cannot be told from what the author wrote, and so is kept.
                "properties": {
                    "at": find["at"] | {"default": None},
                    "default": find["default"],
                }
            },
        }
    ]
    assert second.tools == [SCHEMAS[1], {"name": "none", "parameters": {"properties": {}}}]
    assert first.label == first.metadata["more"] == extra[0]
    assert second.label == second.metadata["more"] == {}


def test_a_null_default_or_const_of_a_schema_stays_and_the_names_of_properties_are_no_schema(
    tmp_path: Path,
) -> None:
    schemas: list[dict[str, Any]] = [
        {"anyOf": [{"type": "string"}, {"const": None}], "default": None},
        {"description": "any", "default": None},
        {"type": ["string"], "properties": {"default": {"type": "string"}, "type": {"type": "string"}}},
        {"type": ["object"], "properties": {"a": {"type": "string"}}},
    ]
    path = parquet(
        tmp_path / "a.parquet",
        {"prompt": ["x"] * 4, "schema": schemas, "plain": [{"default": 1}] + [{"b": 2}] * 3},
    )
    found = [opened(path).row(index).metadata for index in range(4)]
    assert [row["schema"] for row in found] == [
        schemas[0],
        schemas[1],
        schemas[2] | {"default": None},
        schemas[3] | {"default": None},
    ]
    assert [row["plain"] for row in found] == [{"default": 1}] + [{"b": 2}] * 3


def test_maps_and_null_columns_of_parquet_keep_their_nulls(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct({"a": pa.int64(), "b": pa.int64()}))
    column = pa.array([[("k", {"a": 1}), ("l", None)]], kind)
    path = parquet(tmp_path / "a.parquet", pa.table({"prompt": ["x"], "m": column, "n": [None]}))
    assert opened(path).row(0).metadata == {"m": {"k": {"a": 1}, "l": None}, "n": None}


def test_explicit_nulls_of_jsonl_are_the_authors_and_stay(tmp_path: Path) -> None:
    values = {"prompt": [{"role": "assistant", "content": None}], "tools": [{"a": None}], "more": {"b": None}}
    row = opened(jsonl(tmp_path / "a.jsonl", values), tools_key="tools").row(0)
    assert (row.prompt, row.tools, row.metadata) == (values["prompt"], values["tools"], {"more": {"b": None}})


FAR = pa.array([1, 10_000_000, 2], pa.int32()).cast(pa.date32())  # the second is in the year 29,349


def test_a_column_that_nobody_asked_for_and_python_cannot_hold_is_left_out_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nested = pa.array([[{"t": 1}], [{"t": 2**50}], []], pa.list_(pa.struct({"t": pa.timestamp("s")})))
    columns = {"prompt": ["x", "y", "z"], "label": [1, 2, 3], "when": FAR, "deep": nested}
    source = opened(parquet(tmp_path / "a.parquet", pa.table(columns)))
    with caplog.at_level(logging.WARNING):
        assert [set(source.row(index).metadata) for index in (0, 1, 1, 2)] == [
            {"when", "deep"},
            set(),
            set(),
            {"when", "deep"},
        ]
    assert len(caplog.records) == 2
    assert "row=1 reason=column 'when' (date32[day])" in caplog.text


@pytest.mark.parametrize("options", [{"metadata_keys": ["when"]}, {"label_key": "when"}], ids=str)
def test_a_column_that_is_asked_for_and_python_cannot_hold_names_file_row_and_column(
    tmp_path: Path, options: Any
) -> None:
    path = parquet(tmp_path / "a.parquet", pa.table({"prompt": ["x", "y", "z"], "when": FAR}))
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1: column 'when' \(date32\[day\]\) must hold"):
        opened(path, **options)
    assert prompts(opened(path, on_bad_row="skip", **options)) == ["x", "z"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_rows_template_variables_override_those_of_the_configuration(tmp_path: Path, form: str) -> None:
    own = [{"effort": "low"}, {"enable_thinking": True}, None, '{"effort": "high"}'][
        : 4 if form == "jsonl" else 3
    ]
    if form == "jsonl":
        path = jsonl(tmp_path / "a.jsonl", *[{"prompt": "x", "switches": kwargs} for kwargs in own])
    else:
        path = parquet(tmp_path / "a.parquet", {"prompt": ["x"] * len(own), "switches": own})
    source = opened(
        path, chat_template_kwargs={"enable_thinking": False}, chat_template_kwargs_key="switches"
    )
    found = [source.row(index).chat_template_kwargs for index in range(len(own))]
    base = {"enable_thinking": False}
    assert found[:3] == [base | {"effort": "low"}, {"enable_thinking": True}, base]
    assert found[3:] in ([], [base | {"effort": "high"}])
    assert source.row(0).metadata == {}


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_that_hide_the_prompt_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "switches": {name: []}})
    with pytest.raises(ConfigError, match=f"must not contain '{name}'"):
        opened(path, chat_template_kwargs_key="switches")
    with pytest.raises(ConfigError, match=f"chat_template_kwargs must not contain '{name}'"):
        config.from_dict(
            {
                "data": {"path": str(path), "chat_template_kwargs": {name: True}},
                "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
                "reward": {"function": "a.b"},
                "engine": {"urls": ["http://x"]},
            }
        )
