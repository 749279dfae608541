"""The files of a verdict: the result of a search, and the rows of runs. What is damaged or foreign is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.report.files import FORMAT, Run, read_bytes, read_run
from pdserve_bench.search import result as result_files
from pdserve_bench.search.result import GoodputResult

MOST_POINTS: Final = 5000
"""More than any search has: it takes fifty for sixteen layouts."""
MOST: Final = 1e15
"""No count, rate or time of a search is larger."""


class _Head(msgspec.Struct):
    """The field by which a run's file is told from that of a search."""

    format: str = ""


def read(paths: Iterable[Path]) -> tuple[GoodputResult, dict[str, Run]]:
    """Read exactly one result of a search, and the runs beside it by the names of their files.

    Raises `ConfigError` that names the file and, for a wrong value, its field.
    """
    result: GoodputResult | None = None
    runs: dict[str, Run] = {}
    for path in paths:
        if _is_run(path):
            runs[path.name] = read_run(path)
        elif result is not None:
            raise ConfigError(f"--from {path}: is a second result of a search; give one, and any number of files of runs")
        else:
            result = read_result(path)
    if result is None:
        raise ConfigError("--from needs a result of a search: give a file that `pdserve bench goodput --result-file` wrote")
    return result, runs


def _is_run(path: Path) -> bool:
    if path.suffix == ".parquet":
        return True
    try:
        return msgspec.json.decode(read_bytes(path), type=_Head).format == FORMAT
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def read_result(path: Path) -> GoodputResult:
    """Read the result of a search. Raises `ConfigError`."""
    return check(result_files.read_result(path), str(path))


def check(result: GoodputResult, name: str) -> GoodputResult:
    """Refuse numbers that no search gives: they are not finite or negative, or a layout has no decode worker."""
    if not 0 < result.attainment <= 1:
        raise ConfigError(f"{name}: attainment must be above 0 and at most 1, got {result.attainment!r}")
    if len(result.points) > MOST_POINTS:
        raise ConfigError(f"{name}: points must be at most {MOST_POINTS}, got {len(result.points)}")
    for place, one in enumerate(result.points):
        if not 0 <= one.low <= one.high <= 1:
            raise ConfigError(f"{name}: points[{place}]: low and high must be from 0 to 1 in order, got {one.low}, {one.high}")
        if (share := one.figures.disaggregated_share) is not None and not 0 <= share <= 1:
            raise ConfigError(f"{name}: points[{place}].figures.disaggregated_share must be from 0 to 1, got {share}")
        if not 0 <= one.attained <= one.requests:
            raise ConfigError(f"{name}: points[{place}].attained must be from 0 to requests")
    wrong = _wrong(result.slo, "slo") or _wrong(result.layouts, "layouts") or _wrong(result.points, "points")
    if wrong:
        raise ConfigError(f"{name}: {wrong}")
    layouts = [*(one.layout for one in result.layouts), *(one.layout for one in result.points)]
    if any(min(one.decode, one.chunk_tokens, one.max_num_seqs, *one.degrees) < 1 for one in layouts):
        raise ConfigError(
            f"{name}: decode, chunk_tokens, max_num_seqs, prefill_ranks and decode_ranks of a layout must be at least 1"
        )
    if len({one.layout for one in result.layouts}) < len(result.layouts):
        raise ConfigError(f"{name}: layouts has the same layout twice")
    return result


def _wrong(value: object, where: str) -> str | None:
    """Return what is wrong with the first number that is negative or not finite. An upper end of goodput may be infinite."""
    if isinstance(value, tuple):
        return next((found for at, one in enumerate(value) if (found := _wrong(one, f"{where}[{at}]"))), None)
    if is_dataclass(value):
        parts = ((field.name, getattr(value, field.name)) for field in fields(value))
        return next((found for name, one in parts if (found := _wrong(one, f"{where}.{name}"))), None)
    if not isinstance(value, int | float) or isinstance(value, bool) or value == math.inf:
        return None
    if 0 <= value <= MOST:
        return None
    shown = f"{value:.17g}" if isinstance(value, float) or abs(value) < 1 << 63 else "a longer number"
    return f"{where} must be a number from 0 to {MOST:g}, got {shown}"
