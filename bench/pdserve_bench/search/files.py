"""The file of a search: its result so far, and what a search needs to go on. JSON, written whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.report.files import read_bytes, write_whole
from pdserve_bench.search.reshape import Home
from pdserve_bench.search.result import GoodputResult
from pdserve_bench.search.settings import SearchSettings

FORMAT: Final = "pdserve-bench-goodput"
VERSION: Final = 1
"""The version of the format. A reader refuses a newer one."""


@dataclass(frozen=True, slots=True)
class SearchFile:
    """A search as its file holds it."""

    settings: SearchSettings
    identity: dict[str, Any]
    """The values that must be equal for a search to go on: the workload, the seed, and the cluster. JSON's types only."""
    result: GoodputResult
    home: Home | None = None
    """The layout that the search must bring back. None: it is back."""


def write_search(path: Path, search: SearchFile) -> None:
    """Write the file. Raises `ConfigError` when the disk refuses."""
    document = msgspec.to_builtins(search.result)
    document |= {
        "format": FORMAT,
        "version": VERSION,
        "settings": msgspec.to_builtins(search.settings),
        "identity": search.identity,
        "home": msgspec.to_builtins(search.home),
    }
    write_whole(path, msgspec.json.encode(document))  # an infinite number becomes null


def read_search(path: Path) -> SearchFile:
    """Read the file. Raises `ConfigError` that names it and the field."""
    document = _decode(path)
    _check_head(path, document)
    try:
        settings = msgspec.convert(document.get("settings"), SearchSettings)
        identity = msgspec.convert(document.get("identity"), dict[str, Any])
        home = msgspec.convert(document.get("home"), Home | None)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: settings, identity or home: {exc}") from exc
    return SearchFile(settings, identity, _result(path, document), home)


def read_result(path: Path) -> GoodputResult:
    """Read the result alone, of any version that has one. Raises `ConfigError` that names the file and the field."""
    return _result(path, _decode(path))


def _decode(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: is no result of a search: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path}: is damaged or no JSON: {exc}") from exc


def _check_head(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a file of another format, or of a newer version of it."""
    form, version = document.get("format"), document.get("version")
    if form != FORMAT:
        raise ConfigError(f"{path}: format is {form!r} and not {FORMAT!r}: give a file that `pdserve bench goodput` wrote")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ConfigError(f"{path}: version is {version!r}, and this release reads up to {VERSION}")


def _result(path: Path, document: Mapping[str, Any]) -> GoodputResult:
    layouts = document.get("layouts")
    if isinstance(layouts, list):
        for layout in layouts:
            if isinstance(layout, dict) and layout.get("high_per_s", 0.0) is None:
                layout["high_per_s"] = math.inf  # JSON has no infinity
    try:
        return msgspec.convert(document, GoodputResult)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: is no result of a search: {exc}") from exc


def check_same(path: Path, old: SearchFile, settings: SearchSettings, identity: Mapping[str, Any]) -> None:
    """Refuse to go on with a file of another search. The error names the first field that differs."""
    before: dict[str, Any] = {"ttft": old.settings.slo.ttft_s, "tpot": old.settings.slo.tpot_s}
    now: dict[str, Any] = {"ttft": settings.slo.ttft_s, "tpot": settings.slo.tpot_s}
    before |= {"attainment": old.settings.attainment, "workers": old.settings.workers, **old.identity}
    now |= {"attainment": settings.attainment, "workers": settings.workers, **identity}
    for field in [*now, *(name for name in before if name not in now)]:
        if before.get(field) != now.get(field):
            raise ConfigError(
                f"{path}: {field} is {before.get(field)!r} in the file and {now.get(field)!r} now: its points say nothing "
                "about this search. Give another --result-file, or remove the file"
            )
