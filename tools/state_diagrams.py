"""Generate docs/state-machines.md from the transition tables, or with --check fail when it is stale.

A module takes part by having `TRANSITIONS: dict[(State, Event), State]`, or with `(State, Answer)` as values. The first member
of its state enum is the state in which the machine starts. Nothing is drawn by hand, so a diagram cannot say what the code does
not do.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from router.core.live_request import StoryKind
from router.core.request_machine import RequestEvent
from router.core.work_machine import WorkEvent
from tools import generated_doc

TARGET: Final = "docs/state-machines.md"
MACHINES: Final = {
    "Request": "router.core.request_machine",
    "Work on a worker": "router.core.work_machine",
    "Lease": "pdserve.core.lease",
    "Reader": "pdserve.core.reader",
    "Block": "pdserve.core.blocks",
    "Sequence": "pdserve.engine.schedule.sequence",
}
ROOT: Final = Path(__file__).resolve().parents[1]
CORE: Final = "router/core"
HANDLED: Final[dict[str, type[Enum]]] = {"router.core.request_machine": RequestEvent, "router.core.work_machine": WorkEvent}
"""The machines whose events are followed to the functions of the router's core that bring them about."""
HEAD: Final = """# State machines

Generated from the tables in the code by `make docs`; do not edit. An event that a table does not list for a state is
illegal there and raises with the machine's history. A test shows that each entry of each table can happen. Where a table also
gives an answer, the answer follows the event after a slash. Below the machines of the router's core, a table says which
function brings each event about (`router/core/<file>.py`, function), and what it writes into the story that `pdserve explain`
shows. Whatever ends a request writes `ended` as well.
"""

Table = Mapping[tuple[Enum, Enum], Enum | tuple[Enum, Enum]]


def render() -> str:
    """Return the text of the page."""
    tables = {title: (name, transitions_of(name)) for title, name in MACHINES.items()}
    parts = [section(title, name, table) for title, (name, table) in tables.items() if table]
    return "\n".join([HEAD, *parts])


def transitions_of(module: str) -> Table:
    """Return the transitions of a module; they are empty when it has no table."""
    table: Table = getattr(importlib.import_module(module), "TRANSITIONS", {})
    return table


def section(title: str, module: str, table: Table) -> str:
    """Return one machine: its diagram, then notes on what a diagram shows badly. A state that no event leads to is a mistake of
    the table, and raises `AssertionError`.
    """
    arrows = grouped(table)
    states = list(type(next(iter(table))[0]))
    reached = {target for source, target in arrows if source is not target}
    assert reached >= set(states[1:]), f"{module}: nothing leads to {set(states[1:]) - reached}"
    ends = [state for state in states if all(target is state for source, target in arrows if source is state)]
    lines = [f"    [*] --> {states[0].name}"]
    for (source, target), events in arrows.items():
        if not (source is target and source in ends):
            lines.append(f"    {source.name} --> {target.name}: {', '.join(events)}")
    lines += [f"    {state.name} --> [*]" for state in ends]
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])
    parts = [f"## {title}", "", f"`{module.replace('.', '/')}.py`", "", diagram, "", *_notes(ends, arrows)]
    return "\n".join([*parts, *(_handlers(HANDLED[module], arrows) if module in HANDLED else [])])


def grouped(table: Table) -> dict[tuple[Enum, Enum], list[str]]:
    """Return (from, to) -> the events that lead there, with their answers, in the table's order."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for (source, event), entry in table.items():
        target, answer = entry if isinstance(entry, tuple) else (entry, None)
        label = event.name.lower() if answer is None else f"{event.name.lower()} / {answer.name}"
        arrows.setdefault((source, target), []).append(label)
    return arrows


def _notes(ends: list[Enum], arrows: Mapping[tuple[Enum, Enum], list[str]]) -> list[str]:
    """Return a note for each end state on the events that come late. An arrow from a state to itself would only hide the
    others.
    """
    late = {state: events for state in ends if (events := arrows.get((state, state)))}
    lines = [f"- {state.name} takes what comes late and stays: {', '.join(events)}." for state, events in late.items()]
    return [*lines, ""] if lines else []


def _handlers(events: type[Enum], arrows: Mapping[tuple[Enum, Enum], list[str]]) -> list[str]:
    """Return a table of the events: what each does in which state, the functions that bring it about, and what they write into
    the story of the request. An event that no function brings about is a mistake, and raises `AssertionError`."""
    found = dict(_brought_about(events))
    rows = ["| event | from → to | brought about by | the story says |", "| --- | --- | --- | --- |"]
    for event in events:
        moves = [(source, target) for (source, target), names in arrows.items() if event.name.lower() in names]
        if not moves:
            continue
        ways: dict[str, list[str]] = {}
        for source, target in moves:
            ways.setdefault(target.name if target is not source else "the same", []).append(source.name)
        assert event in found, f"nothing brings {event} about"
        functions, kinds = found[event]
        shown = "; ".join(f"{', '.join(sources)} → {target}" for target, sources in ways.items())
        rows.append(f"| {event.name.lower()} | {shown} | {', '.join(functions)} | {', '.join(kinds)} |")
    return [*rows, ""]


def _brought_about(events: type[Enum]) -> Iterator[tuple[Enum, tuple[list[str], list[str]]]]:
    """Yield each event that a function of the core gives to a call, with these functions and the entries that they make in the
    story."""
    functions: dict[Enum, list[str]] = {}
    kinds: dict[Enum, list[str]] = {}
    for path in sorted((ROOT / CORE).glob("*.py")):
        names = vars(importlib.import_module(f"{CORE.replace('/', '.')}.{path.stem}"))
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            given = _members(function, events, names)
            told = _members(function, StoryKind, names)
            for event in given:
                functions.setdefault(event, []).append(f"`{path.stem}.{function.name}`")
                kinds.setdefault(event, []).extend(kind.value for kind in told if kind.value not in kinds.get(event, []))
    for event, where in functions.items():
        yield event, (where, kinds.get(event, []))


def _members(function: ast.FunctionDef, enum: type[Enum], names: Mapping[str, object]) -> list[Enum]:
    """Return the members of an enum that a function passes to calls or takes by default, each once."""
    given = [*function.args.defaults, *function.args.kw_defaults]
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            given += [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg != "why")]
    found = [
        enum[node.attr]
        for node in given
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and names.get(node.value.id) is enum
    ]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    generated_doc.main(TARGET, render())
