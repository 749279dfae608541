"""The glossary and the code agree: terms are defined where the table says, and no name uses a rejected word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer", "sim", "testkit", "bench")
ALLOWED = {
    "ReplicaLost": "the error's name on the wire, known to clients",
    "REPLICA_LOST": "the same",
    "replica_lost": "the same",
    "replicas": "the name of the setting in Kubernetes and Ray, which operators know",
    "min_replicas": "the same",
    "max_replicas": "the same",
}


class Row(NamedTuple):
    """One line of the table."""

    term: str
    where: str
    rejected: tuple[str, ...]


def rows() -> list[Row]:
    """Read the table of docs/glossary.md."""
    lines = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(term, where, tuple(filter(None, rejected.split(", ")))) for term, _, where, rejected in cells]


def names(path: Path) -> Iterator[str]:
    """Yield every name that a file defines: itself, classes, functions, arguments, variables and attributes."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> str:
    """Write a name as lower-case words without plurals: `_PageTable` and `page_tables` are both ` page table `."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return f" {' '.join(part.lower().removesuffix('s') for part in parts)} "


def test_each_term_is_defined_where_the_glossary_says() -> None:
    placed = [(row.term, row.where, re.fullmatch(r"`([\w/.]+)` `(\w+)`", row.where)) for row in rows() if row.where]
    assert len(placed) > 20
    wrong = [
        f"{term}: {where}"
        for term, where, match in placed
        if match is None or not (ROOT / match[1]).exists() or match[2] not in set(names(ROOT / match[1]))
    ]
    assert wrong == []


def test_no_name_uses_a_word_that_the_glossary_rejects() -> None:
    rejected = {f" {word.replace('_', ' ')} ": row.term for row in rows() for word in row.rejected}
    files: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "rpc/v1" not in path.as_posix():
                for name in set(names(path)) - set(ALLOWED):
                    files.setdefault(name, []).append(path)
    found = [
        f"{path.relative_to(ROOT)}: {name} (say {term})"
        for name in sorted(files)
        for spelled in [words(name)]
        for word, term in rejected.items()
        if word in spelled
        for path in files[name]
    ]
    assert found == []
