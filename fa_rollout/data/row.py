"""One row of the data set, as the generator uses it; the same rules apply to every file format.

In: the decoded columns of a row, as plain Python values. Out: a `Row`, or a `BadRow` with the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fa_rollout import config
from fa_rollout.config import reserved_template_name

Prompt = str | list[dict[str, Any]]


class BadRow(ValueError):
    """Why a row is unusable; the reader adds the file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A prompt with its label and metadata. Each read creates new values, which the caller may change."""

    prompt: Prompt
    """Text, or chat messages."""
    label: Any
    """The value in the file, with its type; None if the row has no label."""
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template: from the configuration, overridden by the row."""


def row_from(values: dict[str, Any], data: config.Data) -> Row:
    """Sort a row's columns into prompt, label, tools, template variables and metadata.

    Raises:
        BadRow: the row cannot be used.
    """
    prompt = checked_prompt(values, data.prompt_key)
    taken = data.column_keys
    names = [k for k in values if k not in taken] if data.metadata_keys is None else data.metadata_keys
    own = values.get(data.chat_template_kwargs_key) if data.chat_template_kwargs_key else None
    return Row(
        prompt=prompt,
        label=values.get(data.label_key) if data.label_key else None,
        metadata={name: values[name] for name in names if name in values},
        tools=_tools(values.get(data.tools_key)) if data.tools_key else None,
        chat_template_kwargs=data.chat_template_kwargs | _template_kwargs(own),
    )


def checked_prompt(values: dict[str, Any], key: str) -> Prompt:
    """The prompt of a row: non-empty text, or a non-empty list of messages."""
    if key not in values:
        raise BadRow(f"the row has no prompt: key {key!r} is not among its keys {listed(values)}")
    prompt = values[key]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return prompt
    what = f"an empty {_kind(prompt)}" if prompt in ("", []) else _kind(prompt)
    if isinstance(prompt, list) and prompt:
        what = f"a list that holds {_kind(next(m for m in prompt if not isinstance(m, dict)))}"
    raise BadRow(f"{key!r} must be text or a list of chat messages (objects), found {what}")


def check_numbers(row: Row) -> None:
    """Raise BadRow if an integer does not fit the record, so that this is found before the run."""
    try:
        msgspec.msgpack.encode((row.label, row.metadata))
    except OverflowError:
        raise BadRow(
            "integers in labels and metadata must be from -2**63 to 2**64 - 1, found one out of range; "
            "write it as text"
        ) from None


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas, or their JSON text, the usual way to store different schemas in a Parquet column."""
    value = _from_json("tools", value)
    if value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return value
    raise BadRow(f"tools must be a list of objects, found {_kind(value)}")


def _template_kwargs(value: Any) -> dict[str, Any]:
    """A row's variables for the chat template."""
    value = _from_json("chat template variables", value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(f"chat template variables must be an object, found {_kind(value)}")
    if reserved := reserved_template_name(value):
        raise BadRow(f"chat template variables must not contain {reserved!r}, which is set for each prompt")
    return value


def _from_json(what: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise BadRow(f"{what} given as text must be JSON: {error}") from None


def listed(names: Iterable[str]) -> str:
    """Names for an error text, at most 20."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "") or "(none)"


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
