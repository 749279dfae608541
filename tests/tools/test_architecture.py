"""The pages for those who read the code name files, folders and code that are there, and links of all pages lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = "## Where is the rule that …"
WHERE = (ROOT / "docs/where.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def quoted(line: str) -> list[str]:
    return re.findall(r"`([^`]+)`", line)


def paths_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each quoted path, and the first quoted path of its line."""
    for line in text.splitlines():
        found = [name for name in quoted(line) if re.fullmatch(r"(?!\.venv)[\w.-]+/[\w./-]*", name)]
        yield from ((path, found[0]) for path in found)


def links_of(text: str) -> list[str]:
    return [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]


def exists(path: str, base: str) -> bool:
    """`base` is the folder that a table's row begins with: the row may name folders within it."""
    return (ROOT / path).exists() or (ROOT / base / path).exists()


def rows_of(text: str) -> list[tuple[str, ...]]:
    """Return the cells of each rule: question, answer, where."""
    section = text.partition(RULES)[2].partition("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def cited(where: str) -> list[tuple[str, str]]:
    """Return each (file, name) of a cell such as "`a/b.py` `Class.method`, `CONSTANT`; `c/d.py` `function`"."""
    found: list[tuple[str, str]] = []
    path = ""
    for name in quoted(where):
        if name.endswith(".py"):
            path = name
        else:
            found.append((path, name))
    return found


def names_in(source: str) -> set[str]:
    """Return what a file defines at its top and, after the class's name and a dot, in its classes."""

    def defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return set(defined(ast.parse(source).body, ""))


@pytest.mark.parametrize(("page", "least"), [("docs/where.md", 50), ("CONTRIBUTING.md", 30), ("ARCHITECTURE.md", 5)])
def test_each_path_exists(page, least):
    named = list(paths_of((ROOT / page).read_text()))
    assert len(named) > least
    assert [path for path, base in named if not exists(path, base)] == []


def test_each_link_leads_somewhere():
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in links_of(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert len(PAGES) > 20
    assert lost == []


def test_each_design_note_is_in_the_index():
    folder = ROOT / "docs/design"
    notes = sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")
    first_cells = [line.split("|")[1] for line in (folder / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert sorted(target for cell in first_cells for target in links_of(cell)) == notes


def test_each_rule_is_a_question_an_answer_and_a_place():
    rows = rows_of(WHERE)
    assert len(rows) >= 20
    assert [row for row in rows if len(row) != 3 or not row[0].endswith("?") or not row[1].endswith(".")] == []
    assert [row[0] for row in rows if not cited(row[2])] == []


def test_each_cited_name_is_defined_in_its_file():
    places = [place for row in rows_of(WHERE) for place in cited(row[2])]
    defined = {path: names_in((ROOT / path).read_text()) if (ROOT / path).exists() else set() for path, _ in places}
    assert [f"{path}: {name}" for path, name in places if name not in defined[path]] == []


def test_what_has_moved_or_was_renamed_is_found():
    """The checks above see a path that is not there and a name that is not defined."""
    (moved, base), *_ = paths_of("| `router/no_such_file.py` `Requests` |")
    assert not exists(moved, base)
    assert exists("grpc/", "router/")
    assert cited("`a/b.py` `C.d`, `E`; `f/g.py` `h`") == [("a/b.py", "C.d"), ("a/b.py", "E"), ("f/g.py", "h")]
    assert names_in("class C:\n  x: int\n  def d(self): ...\nE: int = 1\nF = 2") == {"C", "C.x", "C.d", "E", "F"}
