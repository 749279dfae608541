"""Generate docs/state-machines.md from the transition tables, or with --check fail when it is stale.

A module takes part by having `TRANSITIONS: dict[(State, Event), State]`, or with `(State, Answer)` as values. The first member
of its state enum is the state in which the machine starts. Nothing is drawn by hand, so a diagram cannot say what the code does
not do.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Final

from tools import generated_doc

TARGET: Final = "docs/state-machines.md"
MACHINES: Final = {
    "Request": "router.core.request_machine",
    "Work on a worker": "router.core.work_machine",
    "Lease": "pdserve.core.lease",
    "Reader": "pdserve.core.reader",
    "Block": "pdserve.core.blocks",
    "Sequence": "pdserve.engine.schedule.sequence_machine",
}
HEAD: Final = """# State machines

Generated from the tables in the code by `make docs`; do not edit. An event that a table does not list for a state is
illegal there and raises with the machine's history. A test shows that each entry of each table can happen. Where a table also
gives an answer, the answer follows the event after a slash.
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
    return "\n".join([f"## {title}", "", f"`{module.replace('.', '/')}.py`", "", diagram, "", *_notes(ends, arrows)])


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


if __name__ == "__main__":
    generated_doc.main(TARGET, render())
