"""The form of calls as a list of Python calls, as Llama 4 and Gemma write it."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

from pdserve.text.calls.machine import MAX_DEPTH, CallMachine, Malformed, Steps

MAX_CHARS: Final = 1 << 16  # of one list; a longer one is content
MAX_CODE_CHARS: Final = 1 << 13
"""The characters of one list outside of its strings. To parse that many takes up to 20 ms (AMD EPYC), and nobody is served
then."""
_FORMATTED: Final = re.compile(r".?[fFtT]|[fFtT][rR]", re.DOTALL)
"""What stands before the quote of a formatted string, which holds code."""


class Pythonic(CallMachine):
    """A list of calls with named arguments, where the output begins or after the mark. The calls are reported when the list has
    ended."""

    mark = "<|python_start|>"

    def at_start(self) -> Steps:
        """Implements `CallMachine.at_start`."""
        if self._char == "[":
            yield from self._list()

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        yield from self._list()
        yield from self.expect("<|python_end|>")
        self._read.clear()

    def _list(self) -> Steps:
        begin = len(self._read)
        yield from self._balanced()
        called = python_calls("".join(self._read[begin:]))
        for name, _ in called:
            self._known(name)
        for name, arguments in called:
            self.whole(name, arguments)

    def _balanced(self) -> Steps:
        """Read a bracket and all up to the one that closes it. Brackets in strings do not count.

        Only what is surely a string here and for Python is not counted as code. Comments, continued lines and formatted strings
        could hide any amount of code, and are in no call.
        """
        end = len(self._read) + MAX_CHARS
        yield from self.expect("[")
        depth, code_chars = 1, 1
        while depth:
            code_chars += 1
            if not self._char or self._char in "#\\" or code_chars > MAX_CODE_CHARS or depth > MAX_DEPTH:
                raise Malformed
            if self._char in "'\"":
                if _FORMATTED.fullmatch("".join(self._read[-2:])):
                    raise Malformed
                yield from self._quoted(end)
                continue
            depth += (self._char in "[({") - (self._char in "])}")
            yield from self.step()

    def _quoted(self, end: int) -> Steps:
        """Read a string, which ends before `end` characters were read."""
        quote = self._char
        yield from self.step()
        if self._char != quote:
            yield from self._up_to(quote, 1, end)
            return
        yield from self.step()
        if self._char == quote:  # three quotes begin a long string
            yield from self.step()
            yield from self._up_to(quote, 3, end)

    def _up_to(self, quote: str, count: int, end: int) -> Steps:
        """Read the rest of a string, up to so many quotes in a row. Only a long string may have line ends."""
        found = 0
        while found < count:
            if not self._char or len(self._read) >= end or (count == 1 and self._char in "\r\n"):
                raise Malformed
            found = found + 1 if self._char == quote else 0
            if self._char == "\\":
                yield from self.step()
            if self._char:
                yield from self.step()


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call in a list. Raises `Malformed` for any other text."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Malformed
        return [_call(element) for element in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as exc:
        raise Malformed from exc


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in values:
            raise Malformed
        values[keyword.arg] = ast.literal_eval(keyword.value)
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises ValueError for half a surrogate pair, which no answer can hold
    return _name(node.func), text


def _name(node: ast.expr) -> str:
    """Return a name, which may have dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise Malformed
