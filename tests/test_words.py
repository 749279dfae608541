"""Docstrings: every public definition has one, and it begins as a sentence does. A machine can tell no more than that.

`python tests/test_words.py [FOLDER ...]` lists what is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "sim", "testkit", "bench", "tools",
    "deploy",
)  # fmt: skip
_NO_BEGINNING = """
about above across after against along amid among around as at because before behind below beneath beside besides between
beyond but by despite down during except for from how if in inside into like near of off on onto out outside over past per
since so than through till to toward towards under until unto up upon via what when where whereas whether which while who
whom whose why with within without
"""
NO_BEGINNING = frozenset(_NO_BEGINNING.split())
"""Words with which no docstring begins: prepositions, and words that ask or join. What follows them is mostly no sentence."""

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(node: Definition, name: str) -> Iterator[tuple[Definition, str]]:
    """Yield the node and every public definition in it, with dotted names. What is inside of a function is not public."""
    yield node, name
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
                mark = ":" if isinstance(node, ast.Module) else "."
                yield from definitions(child, f"{name}{mark}{child.name}")


def is_said_elsewhere(node: Definition) -> bool:
    """Tell whether another place documents the definition: a setter, an overload, or a method that a protocol file names."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return False
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    return bool(marks & {"setter", "overload", "override"}) or node.name[0].isupper()  # a gRPC method: proto/ says what it does


def faults(path: Path) -> Iterator[str]:
    """Yield one line for each public definition of a file without a docstring, or with one that begins as no sentence does."""
    where = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node, name in definitions(tree, where):
        text = ast.get_docstring(node)
        if not text:
            if not is_said_elsewhere(node) and not (isinstance(node, ast.Module) and not node.body):
                yield f"{name} has no docstring"
            continue
        first = text.split(maxsplit=1)[0].strip("`*:,.;()").lower()
        if first in NO_BEGINNING:
            yield f"{name} begins with {first!r}"
        elif not text.split("\n\n")[0].rstrip().endswith((".", "?", "!", ":", "`", ")")):
            yield f"{name} does not end its first paragraph as a sentence"


def files(room: str) -> list[Path]:
    """Return the files of a room and of all rooms in it; generated ones are not ours to write."""
    return [path for path in sorted((ROOT / room).rglob("*.py")) if "rpc/v1" not in path.as_posix()]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_definition_says_what_it_does(room: str) -> None:
    assert [fault for path in files(room) for fault in faults(path)] == []


if __name__ == "__main__":
    found = [fault for room in sys.argv[1:] or ROOMS for path in files(room) for fault in faults(path)]
    print("\n".join([*found, f"{len(found)} in all"]))
