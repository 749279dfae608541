"""Chat messages to a prompt, with the checkpoint's Jinja template.

A template is code that came with the weights, fed with clients' words: it runs in a sandbox, which can neither reach
Python's internals nor change its inputs, and is bounded in time and size. Settings and helpers are those that templates
are written for, transformers' `apply_chat_template`.
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

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from pdserve.text.sandbox import MAX_CHARS, Sandbox, check_weight, started

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What an expression of a template can raise beside Jinja's own errors, given data it was not written for.
_EXPRESSION_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError)


class ChatTemplate:
    """One compiled template and the special tokens it may name. Immutable; may be used from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ConfigError` when the template is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as exc:
            raise ConfigError(f"the chat template is not valid: {exc}") from exc
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """From chat_template.jinja, else from tokenizer_config.json; None when neither holds one."""
        config = _read_config(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        source = _read_text(file) if file.is_file() else _default_source(config.get("chat_template"))
        if source is None:
            return None
        tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        return cls(source, tokens)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """(role, content) pairs, with the opening of the assistant's next turn at the end.

        Raises `InvalidRequest` on "messages" for what the template refuses, and over the limits.
        """
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(f"must hold 1 to {MAX_MESSAGES} messages, got {len(messages)}", field="messages")
        variables: dict[str, Any] = {
            **self._special_tokens,
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
        for piece in self._template.generate(started(variables)):
            chars += len(piece)
            if chars > MAX_CHARS:
                raise InvalidRequest(f"make a prompt of more than {MAX_CHARS} characters", field="messages")
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it only shows its body."""

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
    """Jinja's own escapes HTML, which prompts are not."""
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
    """`chat_template` is a template, or a list of named ones of which "default" is for plain chats."""
    if isinstance(value, list):
        return next((str(entry["template"]) for entry in value if entry.get("name") == "default"), None)
    return None if value is None else str(value)


def _content(token: Any) -> str:
    """A special token is its text, or an object that holds it."""
    return str(token["content"] if isinstance(token, dict) else token)
