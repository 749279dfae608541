"""The file of a run: what was measured, where, and every row. JSON, or parquet where the name ends so.

The rows of a file that was read equal those that were written. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.report.flat_row import FIELDS, FlatRow, flat, row_of
from pdserve_bench.row import BenchRow

FORMAT: Final = "pdserve-bench-run"
VERSION: Final = 1
"""The version of the format. A reader refuses a newer one, since it may mean something else by the same field."""
MAX_FILE_BYTES: Final = 4 << 30
"""The largest file that is read, so that a wrong name does not use up the memory. A million requests of 128 messages have 3 GiB
as JSON."""


class RunFileError(ConfigError):
    """A file of a run is damaged, foreign or of a newer release. The message names the file, the field, and what to do."""

    def __init__(self, path: Path, problem: str, *, field: str = "") -> None:
        super().__init__(f"{path}: {field + ': ' if field else ''}{problem}")
        self.path = path
        self.field = field


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its file holds it. `meta` holds JSON's types only; `pdserve_bench.report.meta` makes it."""

    rows: tuple[BenchRow, ...]
    meta: dict[str, Any] = field(default_factory=dict)


class _FilesHead(msgspec.Struct):
    """The part of a JSON file that every version has."""

    format: str
    version: int


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON file. `rows` holds arrays, whose places `fields` names."""

    format: str
    version: int
    meta: dict[str, Any]
    fields: list[str]
    rows: list[FlatRow]


def write_run(path: Path, run: Run) -> None:
    """Write the file of a run. Raises `RunFileError` for numbers that are not finite, and when the disk refuses."""
    rows = [flat(row) for row in run.rows]
    for row in rows:
        if bad := row.misfit():
            raise RunFileError(path, f"does not fit into 64 bits or is not finite, in request {row.number}", field=bad)
    try:
        content = _encode(path, rows, run.meta)
    except (ValueError, OverflowError, TypeError) as exc:
        raise RunFileError(path, f"cannot hold this run: {exc}") from exc
    write_whole(path, content)


def read_run(path: Path) -> Run:
    """Read the file of a run. Raises `RunFileError`."""
    content = read_bytes(path)
    if path.suffix == ".parquet":
        from pdserve_bench.report import parquet

        meta, rows = parquet.decode(path, content)
    else:
        meta, rows = _decode_json(path, content)
    return Run(tuple(row_of(row) for row in rows), meta)


def _encode(path: Path, rows: list[FlatRow], meta: dict[str, Any]) -> bytes:
    if path.suffix != ".parquet":
        return msgspec.json.encode(_Document(FORMAT, VERSION, meta, list(FIELDS), rows))
    from pdserve_bench.report import parquet

    return parquet.encode(rows, meta)


def check_head(path: Path, form: str, version: int) -> None:
    """Refuse a file of another format, or of a newer version of it."""
    if form != FORMAT:
        raise RunFileError(path, f"is {form!r} and not {FORMAT!r}: give a file that `pdserve bench run` wrote", field="format")
    if not 1 <= version <= VERSION:
        problem = f"is {version}, and this release reads up to {VERSION}: read the file with the release that wrote it"
        raise RunFileError(path, problem, field="version")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name beside it, and rename it. Raises `RunFileError` when the disk refuses."""
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as exc:
        raise RunFileError(path, f"cannot be written: {exc.strerror or exc}") from exc
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_bytes(path: Path) -> bytes:
    """Read a whole file of at most `MAX_FILE_BYTES`. Raises `RunFileError`."""
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > MAX_FILE_BYTES:
                raise RunFileError(path, f"has {size_bytes} bytes; at most {MAX_FILE_BYTES} are read")
            return file.read(MAX_FILE_BYTES)
    except OSError as exc:
        raise RunFileError(path, f"cannot be read: {exc.strerror or exc}") from exc


def _decode_json(path: Path, content: bytes) -> tuple[dict[str, Any], list[FlatRow]]:
    try:
        head = msgspec.json.decode(content, type=_FilesHead)
        check_head(path, head.format, head.version)
        document = msgspec.json.decode(content, type=_Document)
    except msgspec.ValidationError as exc:
        said, _, place = str(exc).partition(" - at ")
        raise RunFileError(path, said, field=_named(place)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RunFileError(path, f"is damaged or no JSON: {exc}") from exc
    if tuple(document.fields) != FIELDS:
        raise RunFileError(path, f"are not those of version {VERSION}: {', '.join(FIELDS)}", field="fields")
    return document.meta, document.rows


def _named(place: str) -> str:
    """Turn a place such as `$.rows[3][2]` into a field such as `rows[3].sent_s`."""
    place = place.strip("`").removeprefix("$").removeprefix(".")
    name, _, rest = place.partition("[")
    if name != "rows" or not rest.count("["):
        return place
    row, _, column = rest.partition("[")
    index, _, more = column.partition("]")
    known = index.isdigit() and int(index) < len(FIELDS)
    return f"rows[{row}.{FIELDS[int(index)]}{more}" if known else place
