"""Generate docs/state-machines.md from the transition tables, or with --check fail when it is stale.

A module takes part by having `TRANSITIONS: dict[(State, Event), State]`. The first member of its state enum is where
the machine starts. Nothing is drawn by hand, so a diagram cannot say what the code does not do.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Final

from tools import generated_doc

TARGET: Final = "docs/state-machines.md"
MACHINES: Final = {
    "Request": "pdserve.core.request",
    "Lease": "pdserve.core.lease",
    "Reader": "pdserve.core.reader",
    "Block": "pdserve.core.blocks",
}
HEAD: Final = """# State machines

Generated from the tables in `pdserve/core` by `make docs`; do not edit. An event that a table does not list for a state
is illegal there and raises with the machine's history.
"""

Table = Mapping[tuple[Enum, Enum], Enum]


def render() -> str:
    tables = {title: (name, transitions_of(name)) for title, name in MACHINES.items()}
    parts = [section(title, name, table) for title, (name, table) in tables.items() if table]
    return "\n".join([HEAD, *parts])


def transitions_of(module: str) -> Table:
    """Empty for a module that has no table."""
    table: Table = getattr(importlib.import_module(module), "TRANSITIONS", {})
    return table


def section(title: str, module: str, table: Table) -> str:
    """One machine: its diagram, then what a diagram shows badly."""
    arrows = grouped(table)
    states = list(type(next(iter(table))[0]))
    ends = [state for state in states if all(target is state for source, target in arrows if source is state)]
    lines = [f"    [*] --> {states[0].name}"]
    for (source, target), events in arrows.items():
        if not (source is target and source in ends):
            lines.append(f"    {source.name} --> {target.name}: {', '.join(events)}")
    lines += [f"    {state.name} --> [*]" for state in ends]
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])
    return "\n".join([f"## {title}", "", f"`{module.replace('.', '/')}.py`", "", diagram, "", *_notes(states, ends, arrows)])


def grouped(table: Table) -> dict[tuple[Enum, Enum], list[str]]:
    """(from, to) -> names of the events that lead there, in the table's order."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for (source, event), target in table.items():
        arrows.setdefault((source, target), []).append(event.name.lower())
    return arrows


def _notes(states: list[Enum], ends: list[Enum], arrows: Mapping[tuple[Enum, Enum], list[str]]) -> list[str]:
    """What is absorbed at the end, and which states no event of the table leads to."""
    absorbed = {state: events for state in ends if (events := arrows.get((state, state)))}
    lines = [f"- {state.name} absorbs what comes late: {', '.join(events)}." for state, events in absorbed.items()]
    reached = {target for source, target in arrows if source is not target}
    inner = [state.name for state in states[1:] if state not in reached]
    if inner:
        lines.append(f"- The machine enters {', '.join(inner)} by itself, when what it waited for is complete.")
    return [*lines, ""] if lines else []


if __name__ == "__main__":
    generated_doc.main(TARGET, render())
