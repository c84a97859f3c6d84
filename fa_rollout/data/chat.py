"""Renders chat templates as `transformers` does, without importing it.

In: messages and tools. Out: the text to tokenize. Templates come with third-party models, so they run in
Jinja's immutable sandbox and see only plain JSON values.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fa_rollout.config import ConfigError
from shm.errors import FaRolloutError


class PromptError(FaRolloutError, ValueError):
    """A prompt that cannot be tokenized. The error is in the row; other rows may work."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text; it renders as its body."""

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
    """Like Jinja's filter, but without escaping HTML characters, which models were not trained on."""
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
            ConfigError: a template is not valid Jinja.
        """
        self._special_tokens = special_tokens
        self.text = "\n".join(sources.values())
        environment = _environment()
        self._templates = {}
        self._mentioned: set[str] = set()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._mentioned |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as error:
                raise ConfigError(
                    f"the chat template {name!r} of the tokenizer is not valid: {error}"
                ) from error

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> "ChatTemplates":
        """The templates of a tokenizer's folder; template files override `tokenizer_config.json`."""
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return cls(sources or _from_config(config.get("chat_template")), special_tokens)

    @classmethod
    def in_folder(cls, folder: Path) -> "ChatTemplates":
        """The templates without the special tokens that rendering needs."""
        return cls.load(folder, read_json(folder / "tokenizer_config.json"), {})

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat, up to the start of the assistant's next turn.

        As in transformers, null keys of a message are left out; nulls at deeper levels stay.

        Args:
            kwargs: more variables for the template, such as `enable_thinking`.

        Raises:
            ConfigError: the tokenizer has no template.
            PromptError: the template failed on these messages.
        """
        template = self._pick(tools)
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": [{k: v for k, v in message.items() if v is not None} for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        # A template is a program and can raise anything on messages it was not written for.
        except Exception as error:
            raise PromptError(
                f"the chat template cannot render this prompt: {type(error).__name__}: {error}"
            ) from error

    def unused(self, names: Iterable[str]) -> list[str]:
        """The given variables that no template mentions; usually a typo."""
        return sorted(set(names) - self._mentioned)

    def _pick(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise ConfigError(
            "chat messages need a chat template, and the tokenizer has "
            + (f"none named 'default' (only {sorted(self._templates)})" if self._templates else "none")
            + "; use text prompts, or put a chat_template.jinja beside tokenizer.json"
        )


def _from_config(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return dict(value or {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file beside a tokenizer; {} if it does not exist. Raises ConfigError if it is not JSON."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a JSON object, found {type(tree).__name__}")
    return tree
