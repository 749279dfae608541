"""Jinja's sandbox with limits of time and size.

Jinja's own sandbox keeps a template from Python's internals. It does not keep it from computing for ever or from filling
memory, and the template runs on the thread that serves all clients. So here every turn of a loop, every call and every
operator looks at the clock, and an operation whose result may be larger than its operands is measured before it is done.
One operation is bounded by `MAX_CHARS`, and the whole rendering by `RENDER_S`.
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
