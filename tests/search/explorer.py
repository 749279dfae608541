"""An exhaustive search over the states of a model, breadth first, so that a counterexample is a shortest one.

A model gives its initial state and the successors of a state. States are hashable and canonical: equal means that
nothing tells them apart. What breaks a safety rule raises `Violation`, and so does any error of a production machine.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

Label = tuple[Any, ...]


class Violation(Exception):
    """A rule is broken in, or on the way out of, the state that is being looked at."""


class Step(NamedTuple):
    """One event. `sure`: it happens sooner or later, whatever the rest of the world does, such as a timer of one's own."""

    label: Label
    state: Hashable
    sure: bool = False


class Model(Protocol):
    def initial(self) -> Hashable: ...

    def successors(self, state: Any) -> Iterator[Step]:
        """Every event that can happen next. Raises `Violation`, or what a machine raises, at one that must not."""

    def check(self, state: Any) -> None:
        """Raises `Violation` in a bad state."""

    def quiescent(self, state: Any) -> bool:
        """Whether nothing is held."""


@dataclass(frozen=True)
class Counterexample:
    reason: str
    events: tuple[Label, ...]
    cycle: tuple[Label, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.reason}; {len(self.events)} events" + (f", then for ever {len(self.cycle)}" if self.cycle else "")]
        lines += [f"{i:3d}. {' '.join(map(str, label))}" for i, label in enumerate(self.events, 1)]
        lines += [f"  again: {' '.join(map(str, label))}" for label in self.cycle]
        return "\n".join(lines)


class TooManyStates(Exception):
    """The configuration is larger than was meant; nothing has been shown."""


class Graph:
    """All states reached so far, in breadth-first order, and the events between them."""

    def __init__(self, keep_labels: bool) -> None:
        self.states: list[Hashable] = []
        self.index: dict[Hashable, int] = {}
        self.parents = array("q")
        self.labels: list[Label] = []
        self.sources = array("q")
        self.targets = array("q")
        self.keep_labels = keep_labels
        self.edge_labels: list[Label] = []
        """Of every event, not only of those that found a state: `endless` needs them, and they are large."""
        self.sure = bytearray()

    def add(self, state: Hashable, parent: int, label: Label) -> tuple[int, bool]:
        known = self.index.get(state)
        if known is not None:
            return known, False
        self.index[state] = number = len(self.states)
        self.states.append(state)
        self.parents.append(parent)
        self.labels.append(label)
        return number, True

    def connect(self, source: int, target: int, step: Step) -> None:
        self.sources.append(source)
        self.targets.append(target)
        self.sure.append(step.sure)
        if self.keep_labels:
            self.edge_labels.append(step.label)

    def path(self, number: int) -> tuple[Label, ...]:
        """A shortest list of events from the initial state to this one."""
        labels = []
        while self.parents[number] >= 0:
            labels.append(self.labels[number])
            number = self.parents[number]
        return tuple(reversed(labels))


@dataclass(frozen=True)
class Result:
    graph: Graph
    counterexample: Counterexample | None

    @property
    def num_states(self) -> int:
        return len(self.graph.states)

    @property
    def num_transitions(self) -> int:
        return len(self.graph.sources)


def explore(model: Model, *, max_states: int, keep_labels: bool = False) -> Result:
    """Visit every reachable state, or stop at the first that breaks a rule. Raises `TooManyStates`."""
    collected = gc.isenabled()
    gc.disable()  # nothing here is garbage, and looking through millions of tuples for some takes half the time
    try:
        return _explore(model, max_states, keep_labels)
    finally:
        if collected:
            gc.enable()


def _explore(model: Model, max_states: int, keep_labels: bool) -> Result:
    graph = Graph(keep_labels)
    number, _ = graph.add(model.initial(), -1, ("start",))
    waiting = deque([number])
    while waiting:
        number = waiting.popleft()
        state = graph.states[number]
        try:
            model.check(state)
            for step in model.successors(state):
                target, new = graph.add(step.state, number, step.label)
                graph.connect(number, target, step)
                if new:
                    waiting.append(target)
        except Exception as broken:  # noqa: BLE001 - whatever a production machine raises is the finding
            return Result(graph, Counterexample(f"{type(broken).__name__}: {broken}", graph.path(number)))
        if len(graph.states) > max_states:
            raise TooManyStates(f"more than {max_states} states")
    return Result(graph, None)


def stranded(result: Result, model: Model) -> Counterexample | None:
    """A state from which the sure events alone never lead to quiescence; None when there is none."""
    graph = result.graph
    arrivals: list[list[int]] = [[] for _ in graph.states]
    for source, target, sure in zip(graph.sources, graph.targets, graph.sure, strict=True):
        if sure:
            arrivals[target].append(source)
    good = [model.quiescent(state) for state in graph.states]
    waiting = [number for number, is_good in enumerate(good) if is_good]
    while waiting:
        for source in arrivals[waiting.pop()]:
            if not good[source]:
                good[source] = True
                waiting.append(source)
    worst = next((number for number, is_good in enumerate(good) if not is_good), None)
    return None if worst is None else Counterexample("nothing leads to quiescence from here", graph.path(worst))


def endless(result: Result, inside: Callable[[Any], bool], progress: Callable[[Label], bool]) -> Counterexample | None:
    """A shortest cycle among states `inside` that has an event of `progress`: time goes on and nothing else does."""
    graph = result.graph
    within = [inside(state) for state in graph.states]
    onward: dict[int, list[tuple[int, Label]]] = {}
    turning: list[tuple[int, int, Label]] = []
    for source, target, label in zip(graph.sources, graph.targets, graph.edge_labels, strict=True):
        if within[source] and within[target]:
            onward.setdefault(source, []).append((target, label))
            if progress(label):
                turning.append((source, target, label))
    for source, target, label in turning:
        way = _way(onward, target, source)
        if way is not None:
            return Counterexample("a cycle without an end", graph.path(source), (label, *way))
    return None


def _way(onward: dict[int, list[tuple[int, Label]]], start: int, goal: int) -> tuple[Label, ...] | None:
    came: dict[int, tuple[int, Label] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        number = waiting.popleft()
        if number == goal:
            return _labels(came, number)
        for target, label in onward.get(number, ()):
            if target not in came:
                came[target] = (number, label)
                waiting.append(target)
    return None


def _labels(came: dict[int, tuple[int, Label] | None], number: int) -> tuple[Label, ...]:
    labels: list[Label] = []
    while (step := came[number]) is not None:
        number, label = step
        labels.append(label)
    return tuple(reversed(labels))


def canonical(thing: Any) -> Hashable:
    """A value that is equal for two machines exactly if nothing but their histories tells them apart."""
    match thing:
        case None | bool() | int() | float() | str() | bytes():
            return thing
        case tuple() | list() | deque():
            return tuple(canonical(item) for item in thing)
        case set() | frozenset():
            return tuple(sorted((canonical(item) for item in thing), key=repr))
        case dict():
            items = [(canonical(key), canonical(value)) for key, value in thing.items()]
            # Where the order of a dict means something, its type says so.
            return tuple(items if type(thing) is not dict else sorted(items, key=repr))
        case _:
            return type(thing).__name__, tuple(
                (name, canonical(value)) for name, value in _fields(thing) if "history" not in name
            )


def _fields(thing: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(thing, Enum):
        return [("name", thing.name)]
    if hasattr(thing, "__dataclass_fields__"):  # with slots there is no __dict__, or in a subclass an empty one
        return [(name, getattr(thing, name)) for name in thing.__dataclass_fields__]
    if not hasattr(thing, "__dict__"):
        return [(name, getattr(thing, name)) for name in type(thing).__slots__]
    return thing.__dict__.items()
