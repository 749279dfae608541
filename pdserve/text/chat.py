"""The prompt of chat messages, made by the checkpoint's Jinja template.

A template is code that came with the weights, and its input comes from clients. So it runs in a sandbox, which can neither
reach Python's internals nor change its inputs, and which limits time and size. Settings and helpers are those of
transformers' `apply_chat_template`, for which templates are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import new_context

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from pdserve.text.sandbox import MAX_CHARS, Sandbox, check_weight, started

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_OWN_VARIABLES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_NOTHING: Final[Mapping[str, Any]] = {}
_ASKS_FOR_NONE: Final = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")

# An expression of a template can raise these, beside Jinja's own errors, on data for which it was not written.
_EXPRESSION_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError)


class _Compiled:
    """One compiled template, the variables that it reads, and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self.template = environment.from_string(source)
            self.reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as exc:
            raise ConfigError(f"the chat template is not valid: {exc}") from exc
        self.constant = {**self.template.globals, **special_tokens}
        """The variables that are the same in each rendering. Jinja would gather its globals anew for each, which takes as long
        as a short rendering."""


class ChatTemplate:
    """The template of a model, or two of them, one of which is for chats with tools. Immutable, so several threads may use
    it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Compile the template. `tool_source` is the one for chats with tools. None: they have the same. Raises `ConfigError`
        when one is not valid Jinja."""
        self.text = source if tool_source is None else tool_source
        """The text of the template for chats with tools."""
        self._plain = _Compiled(source, special_tokens)
        self._with_tools = self._plain if tool_source is None else _Compiled(tool_source, special_tokens)

    @classmethod
    def load(cls, directory: Path, file: Path | None = None) -> ChatTemplate | None:
        """Read `file`, or else chat_template.jinja, or else tokenizer_config.json. None: no file holds a template. Raises
        `ConfigError`."""
        config = _read_config(directory / "tokenizer_config.json")
        own = directory / "chat_template.jinja"
        given = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
        # A special token is given as the text, or as an object that holds the text.
        tokens = {name: str(token["content"] if isinstance(token, dict) else token) for name, token in given.items()}
        if file is not None or own.is_file():
            return cls(_read_text(file or own), tokens)
        value = config.get("chat_template")
        source = _named_source(value, "default")
        if source is None:
            return None
        return cls(source, tokens, _named_source(value, "tool_use") if isinstance(value, list) else None)

    def check_tools(self) -> None:
        """Raise `InvalidRequest` unless the template reads the tools of a chat."""
        if not self.shows_tools:
            advice = "set tool_choice to required or a function, or start the router with one that does: --chat-template FILE"
            raise InvalidRequest(f"the model's chat template shows no tools to the model; {advice}", field="tools")

    @property
    def shows_tools(self) -> bool:
        """True if the template reads the tools of a chat."""
        return "tools" in self._with_tools.reads

    @property
    def renders_calls(self) -> bool:
        """True if the template shows the calls of earlier messages."""
        return "tool_calls" in self.text

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Render (role, content) pairs to a prompt that ends with the opening of the assistant's next turn. Raises
        `InvalidRequest` as `render_chat` does."""
        return self.render_chat([{"role": role, "content": content} for role, content in messages])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages to a prompt. `variables` are further ones of the template.

        Raises `InvalidRequest` on "tools" or "chat_template_kwargs" for what the template does not read, and on "messages" when
        it refuses them or a limit is passed.
        """
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(f"must hold 1 to {MAX_MESSAGES} messages, got {len(messages)}", field="messages")
        template = self._with_tools if tools else self._plain
        if tools:
            self.check_tools()
        for name in variables:
            if name not in template.reads or name in _OWN_VARIABLES or name in template.constant:
                raise InvalidRequest(
                    "is no variable that the model's chat template reads", field=f"chat_template_kwargs.{name:.60}"
                )
        if not self.renders_calls and any("tool_calls" in message for message in messages):
            raise InvalidRequest("the model's chat template renders no tool_calls", field="messages")
        shown = [self._shown(message) for message in messages]
        try:
            return self._bounded(
                template,
                {
                    **template.constant,
                    **variables,
                    "messages": shown,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": list(tools) or None,
                    "documents": None,
                },
            )
        except jinja2.TemplateError as exc:
            raise InvalidRequest(f"the model's chat template refuses them: {exc.message}", field="messages") from exc
        except _EXPRESSION_ERRORS as exc:
            raise InvalidRequest(f"the model's chat template cannot render them: {exc}", field="messages") from exc

    def _shown(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the message as the template expects it. Most templates add to the content of each message, so a missing one
        is empty for them; a few ask whether it is none."""
        if message["content"] is not None or _ASKS_FOR_NONE.search(self.text):
            return message
        return {**message, "content": ""}

    @staticmethod
    def _bounded(compiled: _Compiled, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        chars = 0
        template = compiled.template
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


def _named_source(value: Any, name: str) -> str | None:
    """Return `chat_template` itself, or the one of this name in a list of templates."""
    if isinstance(value, list):
        return next((str(entry["template"]) for entry in value if entry.get("name") == name), None)
    return None if value is None else str(value)
