"""Compilation of constraints to grammars, which are kept while they are in use.

A compilation runs without the interpreter lock, so it may run in a thread beside the event loop. Nothing can interrupt it
there: `checker.py` compiles a grammar first in a process that can be ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Final

import llguidance

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.structured.grammar_text import grammar_text
from pdserve.structured.limits import LIMITS, MAX_COMPILED
from pdserve.structured.state import ConstraintState, one_line
from pdserve.structured.vocabulary import Vocabulary

_PANIC: Final = "PanicException"  # of PyO3, which is no Exception


class Compiler:
    """Compiles constraints against one vocabulary, and keeps the last `capacity` grammars. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary, capacity: int = MAX_COMPILED) -> None:
        """A grammar depends on its constraint and on the vocabulary, so each model has a compiler of its own."""
        assert capacity >= 1
        self._vocabulary = vocabulary
        self._capacity = capacity
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of grammars that are kept."""
        return len(self._grammars)

    def start(self, constraint: Constraint) -> ConstraintState:
        """Return the state before the first output token. Raises `InvalidRequest`, which names what is not supported.

        A known constraint takes some microseconds. The states of a grammar share its lexer, which grows and changes no mask.
        """
        with self._lock:
            matcher = self._grammars.get(constraint)
            if matcher is not None:
                self._grammars.move_to_end(constraint)
        if matcher is None:
            matcher = self._compile(constraint)
        return ConstraintState(matcher.deep_copy(), partial(self._forget, constraint))

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        matcher = self._matcher_of(constraint)
        with self._lock:
            matcher = self._grammars.setdefault(constraint, matcher)
            self._grammars.move_to_end(constraint)
            while len(self._grammars) > self._capacity:
                self._grammars.popitem(last=False)
        return matcher

    def _matcher_of(self, constraint: Constraint) -> llguidance.LLMatcher:
        """Let the library compile. A simulation has another one."""
        return compile_grammar(self._vocabulary, constraint)

    def _forget(self, constraint: Constraint) -> None:
        """Forget a grammar that has failed. Its lexer may be used up, and a new one begins afresh."""
        with self._lock:
            self._grammars.pop(constraint, None)


def compile_grammar(vocabulary: Vocabulary, constraint: Constraint) -> llguidance.LLMatcher:
    """Compile a constraint. Raises `InvalidRequest`, which names what the library does not support, or the limit."""
    field = f"{FIELD}.{constraint.kind.value}"
    text = grammar_text(constraint)
    try:
        matcher = llguidance.LLMatcher(vocabulary.tokens, text, log_level=0, limits=LIMITS)
    except BaseException as exc:
        if type(exc).__name__ != _PANIC:
            raise
        raise InvalidRequest(f"cannot be compiled: {one_line(str(exc))}", field=field) from exc
    if matcher.is_error():
        raise InvalidRequest(f"cannot be compiled: {one_line(matcher.get_error())}", field=field)
    if warnings := matcher.get_grammar_warnings():
        raise InvalidRequest(f"would not be enforced as a whole: {one_line(warnings[0])}", field=field)
    return matcher
