"""GGUF files inside installed Python packages. Their code does not run, unless a package exists to put its file together."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.checkpoint.cache import build_once
from pdserve.core.errors import ConfigError

ASSEMBLES: Final = "_gguf"
"""A package whose name has this ending may have a function `assemble`, which writes its file from parts, since package indexes
limit sizes."""


def package_gguf(name: str, cache: Path) -> Path | None:
    """Return the GGUF file of an installed package, named as on its index or as it is imported. None: no package has the name,
    or the package has no such file. A file in parts is put together in the cache, once. Raises `ConfigError` when that
    fails."""
    module = name.replace("-", "_")
    if not module.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module that is loaded and has no spec, as __main__
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    return _assembled(name, module, cache) if folders and module.endswith(ASSEMBLES) else None


def _assembled(name: str, module: str, cache: Path) -> Path | None:
    try:
        assemble: Callable[[Path], object] | None = getattr(importlib.import_module(module), "assemble", None)
    except Exception as exc:  # code of the package
        raise ConfigError(f"model {name!r}: its package cannot be imported: {exc}") from exc
    if assemble is None:
        return None
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    file = f"{module.removesuffix(ASSEMBLES)}.gguf"
    return build_once(cache / f"{module}-{version}", functools.partial(_build, name, assemble, file)) / file


def _build(name: str, assemble: Callable[[Path], object], file: str, folder: Path) -> None:
    try:
        assemble(folder / file)
    except Exception as exc:  # code of the package
        raise ConfigError(f"model {name!r}: its package cannot put its file together: {exc}") from exc
