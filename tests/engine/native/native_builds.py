"""Builds the compiled kernels as installing pdserve does, with a compiler of one's choice."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.native import library

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "pdserve" / "engine" / "native" / "src"


def extension(isa: str) -> dict[str, Any]:
    """What pyproject.toml says of those of an instruction set."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        modules = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
    return next(module for module in modules if module["name"].endswith(f"._kernels_{isa}"))


def compiler(name: str) -> str:
    """Its path. Skips the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def build(compiler_path: str, target: Path, *more: str, isa: str = "avx512_bf16", sources: Sequence[str] | None = None) -> Path:
    """A library at `target`, of the kernels' sources unless others are named; `more` goes to the compiler."""
    how = extension(isa)
    sources = sources or [str(ROOT / source) for source in how["sources"]]
    flags = [*how["extra-compile-args"], *how["extra-link-args"], "-fPIC", "-shared", *more]
    subprocess.run([compiler_path, *flags, *sources, "-o", str(target)], check=True, timeout=560)
    return target


def harness_sets() -> list[str]:
    """The sets that this CPU computes. Tiles are emulated where it has none."""
    found = {isa: library.open_library(path).library for isa in library.SETS if (path := library.installed(f"_kernels_{isa}"))}
    own = [isa for isa in library.SETS if found.get(isa) is not None]
    return [*own, library.EMULATED] if "avx512_bf16" in own else own
