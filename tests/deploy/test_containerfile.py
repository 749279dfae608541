"""The image is made as `make setup` makes the virtual environment. It cannot be built here, so it is read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "Containerfile").read_text()
INSTRUCTIONS = re.sub(r"\\\n\s*", "", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))).splitlines()


def of(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in INSTRUCTIONS if line.startswith(f"{name} ")]


def test_base_image_and_torch_are_arguments_and_the_base_defaults_to_cpu() -> None:
    assert of("ARG") == ["BASE=python:3.11-slim", 'TORCH_INDEX=""']
    assert of("FROM") == ["${BASE} AS build", "${BASE}"]


def test_packages_come_pinned_and_in_the_order_of_the_makefile() -> None:
    installs = [line for line in of("RUN") if "pip install" in line]
    assert ['--index-url "$TORCH_INDEX"' in line for line in installs] == [True, False, False, False]
    assert ["-c requirements/constraints.txt" in line for line in installs] == [True, True, False, False]
    assert installs[2] == "pip install --no-deps -r requirements/no-deps.txt"
    assert installs[3].startswith("if python -c ")
    assert "then pip install --no-deps -r requirements/cuda13.txt; fi" in installs[3]
    assert re.search("^torch==", (ROOT / "requirements" / "constraints.txt").read_text(), re.MULTILINE)


def test_the_image_and_make_setup_ask_torch_alike_for_nixls_wheel() -> None:
    """And the two wheels are of one version: peers of both kinds read each other."""
    question = re.compile(r"python -c '([^']+)'")
    asked = [found[1] for text in (TEXT, (ROOT / "Makefile").read_text()) if (found := question.search(text))]
    assert len(asked) == 2
    assert len(set(asked)) == 1
    pins = [
        re.findall(r"nixl-cu1\d==(\S+)", (ROOT / "requirements" / name).read_text()) for name in ("no-deps.txt", "cuda13.txt")
    ]
    assert pins[0] == pins[1] != []


def test_every_package_of_the_distribution_is_copied() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {line.split()[0] for line in of("COPY")}
    packages = {pattern.rstrip("*") for pattern in include}
    assert packages <= copied
    ignore = (ROOT / "deploy" / "Containerfile.dockerignore").read_text().splitlines()
    for path in ["requirements", "pyproject.toml", "README.md", "LICENSE", *packages]:
        assert f"!{path}" in ignore


def test_the_process_is_not_root() -> None:
    assert of("USER") == ["1000:1000"]
    assert INSTRUCTIONS.index("USER 1000:1000") > max(i for i, line in enumerate(INSTRUCTIONS) if "apt-get" in line)
