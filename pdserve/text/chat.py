"""The prompt of chat messages, made by the checkpoint's Jinja template.

A template is code that came with the weights, and its input comes from clients. So it runs in a sandbox, which can neither
reach Python's internals nor change its inputs, and which limits time and size. Settings and helpers are those of
transformers' `apply_chat_template`, for which templates are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import new_context

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from pdserve.text.sandbox import MAX_CHARS, Sandbox, check_weight, started

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# An expression of a template can raise these, beside Jinja's own errors, on data for which it was not written.
_EXPRESSION_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError)


class ChatTemplate:
    """One compiled template and the special tokens that it may name. Immutable, so several threads may use it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. Raises `ConfigError` when it is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as exc:
            raise ConfigError(f"the chat template is not valid: {exc}") from exc
        self._constant = {**self._template.globals, **special_tokens}
        """The variables that are the same in each rendering. Jinja would gather its globals anew for each, which takes as long
        as a short rendering."""

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Read chat_template.jinja, or else tokenizer_config.json. None: neither holds a template. Raises `ConfigError`."""
        config = _read_config(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        source = _read_text(file) if file.is_file() else _default_source(config.get("chat_template"))
        if source is None:
            return None
        tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        return cls(source, tokens)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Render (role, content) pairs to a prompt that ends with the opening of the assistant's next turn.

        Raises `InvalidRequest` on "messages" when the template refuses them or a limit is passed.
        """
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(f"must hold 1 to {MAX_MESSAGES} messages, got {len(messages)}", field="messages")
        variables: dict[str, Any] = {
            **self._constant,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return self._bounded(variables)
        except jinja2.TemplateError as exc:
            raise InvalidRequest(f"the model's chat template refuses them: {exc.message}", field="messages") from exc
        except _EXPRESSION_ERRORS as exc:
            raise InvalidRequest(f"the model's chat template cannot render them: {exc}", field="messages") from exc

    def _bounded(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        chars = 0
        template = self._template
        context = new_context(template.environment, template.name, template.blocks, started(variables), shared=True)
        for piece in template.root_render_func(context):
            chars += len(piece)
            if chars > MAX_CHARS:
                raise InvalidRequest(f"make a prompt of more than {MAX_CHARS} characters", field="messages")
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(Extension):
    """The tag {% generation %}...{% endgeneration %}. It marks the assistant's words for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write `value` as JSON. Jinja's own filter also escapes HTML, which would change prompts."""
    check_weight(value)
    if indent is not None and indent > 16:
        raise jinja2.TemplateRuntimeError(f"it indents JSON by {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8: {exc}") from exc


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except ValueError as exc:
        raise ConfigError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return config


def _default_source(value: Any) -> str | None:
    """Return the template for plain chats: `chat_template` itself, or the one named "default" in a list of templates."""
    if isinstance(value, list):
        return next((str(entry["template"]) for entry in value if entry.get("name") == "default"), None)
    return None if value is None else str(value)


def _content(token: Any) -> str:
    """Return the text of a special token, which is given as the text or as an object that holds the text."""
    return str(token["content"] if isinstance(token, dict) else token)
