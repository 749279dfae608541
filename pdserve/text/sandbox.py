"""Jinja's sandbox with bounds on time and size.

Jinja's own keeps a template from Python's internals, but not from computing for ever or filling memory, and it runs on
the thread that serves everyone. Here every turn of a loop, call and operator looks at the clock, and what makes a value
larger than its parts is measured before it is done. So one step is bounded by `MAX_CHARS`, all of them by `RENDER_S`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS: Final = 16 << 20  # of one value; twice the largest body that the router takes
RENDER_S: Final = 2.0  # 4,096 messages through a long template take 0.05 s
_MAX_BITS: Final = 4096  # of a whole number
_DEADLINE: Final = "pdserve deadline"  # not an identifier: no template can name or set it
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
    """What exceeds a bound raises `TemplateRuntimeError`. Render with the variables of `started`."""

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
        """What a macro or a block of output becomes."""
        parts = list(pieces)
        _check_size(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        tick(context)
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        tick(context)
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)  # measuring would use it up
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
        """Of `map` and its like, for each element."""
        if context is not None:
            tick(context)
        return super().call_filter(name, value, args, kwargs, context, eval_ctx)


def started(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for one rendering, whose time runs from now."""
    return {**variables, _DEADLINE: time.monotonic() + RENDER_S}


def tick(context: Context) -> bool:
    """True, or raises when the time is over."""
    if time.monotonic() > context.parent[_DEADLINE]:
        raise TemplateRuntimeError(f"it computes for more than {RENDER_S:g} s")
    return True


@pass_context
def joined(context: Context, *parts: Any) -> str:
    """a ~ b ~ c"""
    tick(context)
    _check_size(sum(map(_weigh, parts)))
    return "".join(map(str, parts))


class _Guards(NodeTransformer):
    """Calls `tick` in each turn of a loop, also one whose condition fails, and `joined` for each ~."""

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
    """A filter, its operands checked first; it gets what it asks for as its first argument, as Jinja gives it."""
    wanted = getattr(plain, "jinja_pass_arg", None)

    @pass_context
    def checked(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        tick(context)
        value = list(value) if isinstance(value, Iterator) else value  # measuring would use it up
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
    """Before `value` becomes a text."""
    _check_size(_weigh(value))


def _length(value: Any, *, number: bool = False) -> int:
    """Of a text or list, 0 for anything else; `number`: a whole number is its own length."""
    if isinstance(value, int):
        return abs(value) if number else 0
    return len(value) if isinstance(value, Sized) else 0


def _weigh(value: Any) -> int:
    """About the characters of `str(value)`; beyond the limit it stops counting: shared parts can make it endless."""
    total, todo = 0, [value]
    while todo and total <= MAX_CHARS:
        part = todo.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping):
            total += 4
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            total += 2 + 8 * len(part)  # also bounds the time that this takes
            todo += part
        else:
            total += 1
    return total


def _check_size(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateRuntimeError(f"it makes a text of more than {MAX_CHARS} characters")


def _measured(value: Any) -> Any:
    """Each value on its way out."""
    check_weight(value)
    return value


_CHECKS: Final = {"indent": _check_indent, "join": _check_join, "replace": _check_replace, "string": check_weight}
