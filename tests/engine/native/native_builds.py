"""Builds the compiled kernels as installing pdserve does, with a compiler of one's choice."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
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


ONE_CLASS = tuple(isa for isa in library.SETS if isa != "amx")
"""The sets that have the same bits. Products of AMX are added up otherwise: see test_native_tiles.py."""


def harness_sets() -> list[str]:
    """The sets that this CPU computes. Tiles are emulated where it has none."""
    paths = {isa: path for isa in library.SETS if (path := library.installed(f"_kernels_{isa}")) is not None}
    own = [isa for isa, path in paths.items() if library.open_library(path).library is not None]
    return [*own, library.EMULATED] if "avx512_bf16" in own and "amx" in paths else own


@cache
def _emulated() -> library.Found:
    """A library apart from that of the process, whose tiles may be those of the CPU."""
    path = library.installed("_kernels_amx")
    assert path is not None
    with tempfile.TemporaryDirectory() as directory:
        return library.open_library(Path(shutil.copy(path, directory)), emulated=True)


def installed_set(isa: str) -> library.Found:
    """The library of a set. Skips the test where this CPU does not run it."""
    path = library.installed(f"_kernels_{isa}")
    found = _emulated() if isa == library.EMULATED else library.open_library(path) if path else library.Found(None, "not built")
    if found.library is None:
        pytest.skip(found.why)
    return found
