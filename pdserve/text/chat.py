"""The prompt of chat messages, made by the checkpoint's Jinja template.

A template is code that came with the weights, and its input comes from clients. So it runs in a sandbox, which can neither
reach Python's internals nor change its inputs, and which limits time and size. Settings and helpers are those of
transformers' `apply_chat_template`, for which templates are written.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import TemplateRuntimeError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, new_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.limits import MAX_MESSAGES

# The sandbox ----------------------------------------------------------------------------------------------------------
#
# Jinja's sandbox with limits of time and size.
#
# Jinja's own sandbox keeps a template from Python's internals. It does not keep it from computing for ever or from filling
# memory, and the template runs on the thread that serves all clients. So here every turn of a loop, every call and every
# operator looks at the clock, and an operation whose result may be larger than its operands is measured before it is done.
# One operation is bounded by `MAX_CHARS`, and the whole rendering by `RENDER_S`.


MAX_CHARS: Final = 16 << 20  # the largest text of one value; twice the largest body that the router takes by default
RENDER_S: Final = 2.0  # 4,096 messages through a long template take 0.05 s
_MAX_BITS: Final = 4096  # the largest whole number has so many bits
_DEADLINE: Final = "pdserve deadline"  # this is no identifier, so no template can name or set it
_WIDE_FIELD: Final = re.compile(r"\d{5}|\*|\{[^}]*\{")
_REFUSED_METHODS: Final = frozenset({"center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"})
_REFUSED_FILTERS: Final = (
    "batch",
    "center",
    "filesizeformat",
    "format",
    "pprint",
    "random",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)


class Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment with limits. A template that passes a limit raises `TemplateRuntimeError`.

    Templates must be rendered with the variables that `started` returns.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_measured, **options)
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, check in _CHECKS.items():
            self.filters[name] = _guarded(self.filters[name], check)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the pieces of a macro's or a block's output. Raises `TemplateRuntimeError` above `MAX_CHARS`."""
        parts = list(pieces)
        _check_size(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the time and the size of the result, then apply the operator."""
        tick(context)
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check the time and, for a method of a text, the size of the result, then call `obj`."""
        tick(context)
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)  # measuring uses iterators up
            _check_method(text, method.__name__, (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: nodes.EvalContext | None = None,
    ) -> Any:
        """Check the time, then call the filter. `map` and similar filters call this for each element."""
        if context is not None:
            tick(context)
        return super().call_filter(name, value, args, kwargs, context, eval_ctx)


def started(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables for one rendering. Its time limit begins now."""
    return {**variables, _DEADLINE: time.monotonic() + RENDER_S}


def tick(context: Context) -> bool:
    """Return True. Raises `TemplateRuntimeError` when the rendering has used up its time."""
    if time.monotonic() > context.parent[_DEADLINE]:
        raise TemplateRuntimeError(f"it computes for more than {RENDER_S:g} s")
    return True


@pass_context
def joined(context: Context, *parts: Any) -> str:
    """Compute `a ~ b ~ c`: check the time and the size, then join the parts as text."""
    tick(context)
    _check_size(sum(map(_weigh, parts)))
    return "".join(map(str, parts))


class _Guards(NodeTransformer):
    """A rewriter of templates. It adds a call of `tick` to each turn of a loop, also to turns whose condition fails, and
    replaces each ~ by a call of `joined`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(
            nodes.ImportedName(f"{__name__}.tick"), [nodes.ContextReference()], [], None, None, lineno=node.lineno
        )
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(call, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.ImportedName(f"{__name__}.joined"), node.nodes, [], None, None, lineno=node.lineno)


def _guarded(plain: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return the filter `plain` with a check of time and operands before it.

    A filter that Jinja calls with a context, an eval context or an environment as first argument still gets it.
    """
    wanted = getattr(plain, "jinja_pass_arg", None)

    @pass_context
    def checked(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        tick(context)
        value = list(value) if isinstance(value, Iterator) else value  # measuring uses an iterator up
        check(value, *args, *kwargs.values())
        given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return plain(*([given[wanted.name]] if wanted else []), value, *args, **kwargs)

    return checked


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        grown = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        if grown > _MAX_BITS:
            raise TemplateRuntimeError("it makes too large a number")
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif operator == "*":
        _check_size(_length(left, number=True) * _length(right, number=True))
    elif operator == "+":
        _check_size(_length(left) + _length(right))


def _check_method(text: str, name: str, args: Iterable[Any]) -> None:
    if name in _REFUSED_METHODS:
        raise TemplateRuntimeError(f"it calls {name}, which is not supported")
    if name == "format":
        _check_format(text, *args)
    elif name == "replace":
        _check_replace(text, *args)
    elif name == "join":
        for parts in args:
            _check_join(parts, text)


def _check_format(text: str, *args: Any) -> None:
    if _WIDE_FIELD.search(text):
        raise TemplateRuntimeError("it formats with a field of great or computed width")
    fields = text.count("%") + text.count("{")
    _check_size(len(text) + fields * (10_000 + sum(map(_weigh, args))))


def _check_replace(value: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    text = str(value)
    _check_size(len(text) + text.count(str(old)) * _length(new))


def _check_join(parts: Any, separator: Any = "", *_: Any) -> None:
    _check_size(_weigh(parts) + _length(parts) * _length(separator))


def _check_indent(value: Any, width: Any = 4, *_: Any) -> None:
    _check_size(_length(value) + str(value).count("\n") * _length(width, number=True) + _length(width, number=True))


def check_weight(value: Any, *_: Any) -> None:
    """Raise `TemplateRuntimeError` when `value` as text would have more than `MAX_CHARS` characters."""
    _check_size(_weigh(value))


def _length(value: Any, *, number: bool = False) -> int:
    """Return the length of a text or list, 0 for other values. `number`: a whole number counts as its absolute value."""
    if isinstance(value, int):
        return abs(value) if number else 0
    return len(value) if isinstance(value, Sized) else 0


def _weigh(value: Any) -> int:
    """Estimate the number of characters of `str(value)`.

    The count stops beyond `MAX_CHARS`, since a value that holds the same part many times could take for ever.
    """
    total, todo = 0, [value]
    while todo and total <= MAX_CHARS:
        part = todo.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping):
            total += 4
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            total += 2 + 8 * len(part)  # counting the elements also limits the time of this loop
            todo += part
        else:
            total += 1
    return total


def _check_size(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateRuntimeError(f"it makes a text of more than {MAX_CHARS} characters")


def _measured(value: Any) -> Any:
    """Check the size of a value that the template prints, and return the value."""
    if type(value) is not str or len(value) > MAX_CHARS:  # most values are short texts
        check_weight(value)
    return value


_CHECKS: Final = {"indent": _check_indent, "join": _check_join, "replace": _check_replace, "string": check_weight}


# Templates -------------------------------------------------------------------------------------------------------

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
        self.renders_calls = "tool_calls" in self.text
        """True if the template shows the calls of earlier messages."""
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
