"""`python -m tools.house`: the lines of each room, and names and functions that cost a reader more than they give.

`--check` fails for a class name that two files define, for a private function of so few lines with one caller that it should
stand where it is called, for a protocol that one class alone fulfils, and for an import past the door of a room that has one.
Each had a number when its check came, which may only fall. The door of a room is `__all__` in its `__init__.py`: the modules
that other rooms may import.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[1]
SERVING: Final = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer")
PRODUCTION: Final = (*SERVING, "bench/pdserve_bench")
ROOMS: Final = (*SERVING, "sim", "testkit", "bench", "deploy", "tools", "tests")
HAVE_ROOMS: Final = ("pdserve", "router")
GENERATED: Final = "rpc/v1"
MOST_SHARED_NAMES: Final = 3
"""Class names that several files of the product and of the simulators define."""
FEW_LINES: Final = 4
"""A private function with fewer lines, its head included and its docstring left out, and one caller is inlined."""
MOST_TINY: Final = 65
SEAMS: Final = {
    "RouterApi": "a front end of one's own is written against it; the router of tests/seams fulfils it as well",
    "AdminApi": "the same for operators' calls",
    "GrammarState": "the pure core checks sequences against it; what fulfils it loads llguidance",
    "GpuContext": "what fulfils it loads CUDA's driver",
    "ClusterView": "a search knows no console; what fulfils it shows the search on one",
    "Layers": "a tuple fulfils it as well",
    "Device": "what fulfils it needs a GPU, and the order of the steps is tested without one",
    "Grouped": "what fulfils it loads Triton",
    "Runner": "what fulfils it loads torch, and the thread that steps it is tested without a model",
    "ToldCounts": "the messages of the link and of the client API fulfil it as well",
    "Tap": "the simulated world knows no fault; a simulation plugs in what watches and kills",
}
"""Protocols with one class here, each with the reason why it stays."""
MOST_LONE_PROTOCOLS: Final = 0
MOST_PAST_DOORS: Final = 0
MOST_WITHOUT_DOOR: Final = 0


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


@dataclass(frozen=True, slots=True)
class Shape:
    """A class as its text shows it: its names, those of its base classes, and where it stands."""

    where: str
    name: str
    names: frozenset[str]
    bases: tuple[str, ...]

    @property
    def is_protocol(self) -> bool:
        """True if the class says what others have, and is none of them."""
        return "Protocol" in self.bases


def shapes() -> list[Shape]:
    """Return the classes of the product and of the simulators."""
    found = []
    for path in sources(*PRODUCTION, "sim"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                found.append(Shape(where, node.name, frozenset(_names(node)), tuple(ast.unparse(base) for base in bases)))
    return found


def _names(node: ast.ClassDef) -> Iterator[str]:
    """Give the methods and attributes of a class: those of its body, and those that its methods set."""
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.ClassDef(body=body):
                yield from (
                    target.id
                    for one in body
                    if isinstance(one, ast.Assign)
                    for target in one.targets
                    if isinstance(target, ast.Name)
                )


def lone_protocols() -> list[str]:
    """Return the protocols that one class or none has the names of. One with `__call__` alone is the type of a function."""
    classes = shapes()
    by_name = {shape.name: shape for shape in classes}

    def names(shape: Shape) -> frozenset[str]:
        return shape.names.union(*(names(by_name[base]) for base in shape.bases if base in by_name and base != shape.name))

    concrete = [(shape, names(shape)) for shape in classes if not shape.is_protocol]
    found = []
    for protocol in (shape for shape in classes if shape.is_protocol and shape.name not in SEAMS):
        wanted = names(protocol)
        fulfil = [shape.name for shape, has in concrete if wanted <= has]
        if wanted != {"__call__"} and len(fulfil) < 2:
            found.append(f"{protocol.where} {protocol.name}: {', '.join(fulfil) or 'no class'}")
    return found


@functools.cache
def door(package: str) -> frozenset[str] | None:
    """Return the modules of a package that others may import, and the names that it gives itself. None: it has no door."""
    init = ROOT / package.replace(".", "/") / "__init__.py"
    if init.is_file():
        body = ast.parse(init.read_text()).body
        given = {each.name for node in body if isinstance(node, ast.ImportFrom) for each in node.names}
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                    found = frozenset(name.value for name in names if isinstance(name, ast.Constant))
                    there = {path.stem for path in init.parent.iterdir()}
                    return found if found <= given | there else None
    return None


def room_of(module: str) -> str:
    """Return the room of a module: a folder of `pdserve` or `router`, or another package as a whole."""
    parts = module.split(".")
    has_rooms = parts[0] in HAVE_ROOMS and ROOT.joinpath(*parts[:2]).is_dir()
    return ".".join(parts[:2] if has_rooms else parts[:1])


def past_doors() -> list[str]:
    """Return the imports of modules that the door of their room, or of a folder in it, does not name."""
    found = []
    for path in sources(*(room for room in ROOMS if room != "tests")):
        importer = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module or room_of(node.module) == importer:
                continue
            for name in (each.name for each in node.names):
                parts = [*node.module.split("."), name]
                for depth in range(len(room_of(node.module).split(".")), len(parts)):
                    names = door(".".join(parts[:depth]))
                    if names is not None and parts[depth] not in names:
                        found.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.module}")
    return sorted(set(found))


def without_door() -> list[str]:
    """Return the rooms of the product that have no door."""
    rooms = {room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in sources(*SERVING)}
    return sorted(room for room in rooms - {*HAVE_ROOMS} if door(room) is None)


def main() -> None:
    """Print the rooms, or check the names and functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail for what costs a reader more than before")
    check, console = parser.parse_args().check, Console(width=120)
    names = shared_names()
    costs = (
        ("class names in several files", MOST_SHARED_NAMES, [f"{name}: {', '.join(where)}" for name, where in names.items()]),
        ("tiny functions with one caller", MOST_TINY, tiny_functions()),
        ("protocols that one class alone fulfils", MOST_LONE_PROTOCOLS, lone_protocols()),
        ("imports past the door of a room", MOST_PAST_DOORS, past_doors()),
        ("rooms without a door", MOST_WITHOUT_DOOR, without_door()),
    )
    if not check:
        table = Table("room", "files", "lines")
        for room, (files, lines) in lines_by_room().items():
            table.add_row(room, str(files), str(lines))
        console.print(table)
        for _, _, found in costs:
            for one in found:
                console.print(one, highlight=False)
    console.print(", ".join(f"{len(found)} {what}" for what, _, found in costs), highlight=False)
    if check and (risen := [f"at most {most} {what}" for what, most, found in costs if len(found) > most]):
        sys.exit(f"{'; '.join(risen)}: `python -m tools.house` names them")


if __name__ == "__main__":
    main()
