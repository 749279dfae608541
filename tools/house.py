"""`python -m tools.house`: the lines of each room, and names and functions that cost a reader more than they give.

`--check` fails for a class name that two files define, and for a private function of so few lines with one caller that it
should stand where it is called. Both had numbers when the check came; they may only fall.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[1]
SERVING: Final = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer")
PRODUCTION: Final = (*SERVING, "bench/pdserve_bench")
ROOMS: Final = (*SERVING, "sim", "testkit", "bench", "deploy", "tools", "tests")
GENERATED: Final = "rpc/v1"
MOST_SHARED_NAMES: Final = 3
"""Class names that several files of the product and of the simulators define."""
FEW_LINES: Final = 4
"""A private function with fewer lines, its head included and its docstring left out, and one caller is inlined."""
MOST_TINY: Final = 65


def sources(*packages: str) -> Iterator[Path]:
    """Give the files of packages, without generated ones."""
    for package in packages:
        yield from (path for path in sorted((ROOT / package).rglob("*.py")) if GENERATED not in path.as_posix())


def lines_by_room() -> dict[str, tuple[int, int]]:
    """Return the files and lines of each folder that has any."""
    rooms: defaultdict[str, list[int]] = defaultdict(list)
    for path in sources(*ROOMS):
        rooms[path.parent.relative_to(ROOT).as_posix()].append(len(path.read_text().splitlines()))
    return {room: (len(lines), sum(lines)) for room, lines in sorted(rooms.items())}


def shared_names() -> dict[str, list[str]]:
    """Return the class names that several files define, with these files."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sources(*PRODUCTION, "sim"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(files) for name, files in sorted(found.items()) if len(files) > 1}


def tiny_functions() -> list[str]:
    """Return the private functions of a few lines that are named once beside their definition, to be called.

    A function that is handed over by its name cannot be inlined, nor can one that replaces that of a base class.
    """
    found = []
    for path in sources(*PRODUCTION, "sim"):
        text = path.read_text()
        names = Counter(re.findall(r"\b_[A-Za-z0-9_]*\b", text))
        calls = Counter(re.findall(r"(?<!super\(\)\.)\b(_[A-Za-z0-9_]*)\(", text))  # the head of a definition looks like one
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("_") or node.name.startswith("__"):
                continue
            if node.decorator_list or (names[node.name], calls[node.name]) != (2, 2):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 2 < FEW_LINES:
                found.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}")
    return found


def main() -> None:
    """Print the rooms, or check the names and functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail for what costs a reader more than before")
    check, console = parser.parse_args().check, Console(width=120)
    names, tiny = shared_names(), tiny_functions()
    if not check:
        table = Table("room", "files", "lines")
        for room, (files, lines) in lines_by_room().items():
            table.add_row(room, str(files), str(lines))
        console.print(table)
        for name, where in names.items():
            console.print(f"{name}: {', '.join(where)}", highlight=False)
        for one in tiny:
            console.print(one, highlight=False)
    console.print(f"{len(names)} class names in several files, {len(tiny)} tiny functions with one caller", highlight=False)
    if check and (len(names) > MOST_SHARED_NAMES or len(tiny) > MOST_TINY):
        sys.exit(f"at most {MOST_SHARED_NAMES} and {MOST_TINY}: `python -m tools.house` names them")


if __name__ == "__main__":
    main()
