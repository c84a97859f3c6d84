"""Chat templates, rendered as `transformers` renders them, without it.

In: messages and tools. Out: the text to tokenize. A template comes with a model from strangers, so it runs in
Jinja's immutable sandbox and sees plain JSON values alone.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fa_rollout.config import ConfigError
from shm.errors import FaRolloutError


class PromptError(FaRolloutError, ValueError):
    """A prompt that cannot be turned into tokens: the fault is the row's, and other rows may work."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters; models were not trained on that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplates:
    """The chat templates of a tokenizer: usually one, `default`, and sometimes one for tools, `tool_use`."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        """Compile the templates; `special_tokens` (`bos_token` and so on) are variables of each.

        Raises:
            ConfigError: a template is no valid Jinja.
        """
        self._special_tokens = special_tokens
        environment = _environment()
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ConfigError(
                    f"the chat template {name!r} of the tokenizer is not valid: {error}"
                ) from error

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> "ChatTemplates":
        """The templates of a tokenizer's folder; files of their own win over `tokenizer_config.json`."""
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return cls(sources or _from_config(config.get("chat_template")), special_tokens)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """The text of a chat, up to where the assistant's next turn begins.

        Raises:
            ConfigError: the tokenizer has no template.
            PromptError: the template refuses these messages.
        """
        template = self._pick(tools)
        chat = [_without_nulls(message) for message in messages]
        variables: dict[str, Any] = {**self._special_tokens, "messages": chat, "tools": tools}
        try:
            return template.render(documents=None, add_generation_prompt=True, **variables)
        # A template is a program of its own and can fail in any way on a message it was not made for.
        except Exception as error:
            raise PromptError(
                f"the chat template cannot render this prompt: {type(error).__name__}: {error}"
            ) from error

    def _pick(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise ConfigError(
            "chat messages need a chat template, and the tokenizer has "
            + (f"none named 'default' (only {sorted(self._templates)})" if self._templates else "none")
            + "; give prompts as text, or put a chat_template.jinja beside tokenizer.json"
        )


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the keys that Parquet fills with null where others have them, in its parts too.

    Templates would print them as "None", and take a part of text that has a key `image` for an image.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [_without_nulls(part) if isinstance(part, dict) else part for part in content]
    return kept


def _from_config(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return dict(value or {})
