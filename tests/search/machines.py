"""Production machines as small numbers, so that a state of the model is a cheap tuple.

A machine's state is interned: equal states share one number and one object, which is never changed. An event is applied
to a copy, and what it did is remembered. A search repeats the same few thousand events of single machines in millions
of combinations, so production code runs once for each and the search costs dictionary look-ups.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

from tests.search.explorer import canonical


class Machines:
    """All states that machines were seen in. Invariants are checked at every one."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._applied: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._asked: dict[tuple[Any, ...], Any] = {}

    def add(self, machine: Any) -> int:
        """The number of this machine's state. Raises AssertionError when its invariants do not hold."""
        key = canonical(machine)
        number = self._numbers.get(key)
        if number is None:
            machine.check_invariants()
            self._numbers[key] = number = len(self._objects)
            self._objects.append(machine)
        return number

    def apply(self, number: int, event: Callable[..., Any], *args: Hashable) -> tuple[int, Any]:
        """What `event(machine, *args)` leads to and answers. The answer is shared: it must not be changed."""
        key = (number, event, args)
        found = self._applied.get(key)
        if found is None:
            machine = copy.deepcopy(self._objects[number])
            answer = event(machine, *args)
            found = self._applied[key] = (self.add(machine), answer)
        return found

    def ask(self, number: int, question: Callable[..., Any], *args: Hashable) -> Any:
        """The answer to a question that changes nothing."""
        key = (number, question, args)
        if key not in self._asked:
            self._asked[key] = question(self._objects[number], *args)
        return self._asked[key]

    @property
    def num_states(self) -> int:
        return len(self._objects)

    @property
    def num_events(self) -> int:
        return len(self._applied)
