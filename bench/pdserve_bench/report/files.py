"""The file of a run: what was measured, where, and every row. JSON, or parquet where the name ends so.

The rows of a file that was read equal those that were written. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_type_hints

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.row import BenchRow, Served

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


def write_run(path: Path, run: Run) -> None:
    """Write the file of a run. Raises `RunFileError` for numbers that are not finite, and when the disk refuses."""
    rows = [flat(row) for row in run.rows]
    for row in rows:
        if bad := misfit(row):
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
        meta, rows = decode_parquet(path, content)
    else:
        meta, rows = _decode_json(path, content)
    return Run(tuple(row_of(row) for row in rows), meta)


def _encode(path: Path, rows: list[Any], meta: dict[str, Any]) -> bytes:
    if path.suffix != ".parquet":
        return msgspec.json.encode(_DOCUMENT(FORMAT, VERSION, meta, list(FIELDS), rows))

    return encode_parquet(rows, meta)


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


def _decode_json(path: Path, content: bytes) -> tuple[dict[str, Any], list[Any]]:
    try:
        head = msgspec.json.decode(content, type=_FilesHead)
        check_head(path, head.format, head.version)
        document = msgspec.json.decode(content, type=_DOCUMENT)
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


# One row as the files hold it: fields in one fixed order, without anything nested but the arrivals, which are two lists.
# `BenchRow` and `Served` say the fields and their types.

LARGEST: Final = (1 << 63) - 1
"""The largest integer of a column in parquet."""
_OF_SERVED: Final = get_type_hints(Served)
_OF_ROW: Final = {name: kind for name, kind in get_type_hints(BenchRow).items() if name not in ("arrivals", "served")}
_TYPES: Final = {**_OF_ROW, **_OF_SERVED, "arrival_times_s": list[float], "arrival_tokens": list[int]}
FIELDS: Final = tuple(_TYPES)
_KINDS: Final = {name: get_args(kind)[0] if isinstance(kind, UnionType) else kind for name, kind in _TYPES.items()}
"""The types without None."""
NUMBERS: Final = tuple(name for name, kind in _KINDS.items() if kind in (int, float))


def _check_arrivals(row: Any) -> None:
    """Refuse arrivals without their tokens. A file that is read raises `msgspec.ValidationError`."""
    times, tokens = len(row.arrival_times_s), len(row.arrival_tokens)
    if times != tokens:
        raise ValueError(f"{times} arrival_times_s and {tokens} arrival_tokens do not match")


FLAT_ROW: Final[Any] = msgspec.defstruct(
    "FlatRow", list(_TYPES.items()), namespace={"__post_init__": _check_arrivals}, array_like=True, forbid_unknown_fields=True
)
_DOCUMENT: Final[Any] = msgspec.defstruct(
    "_Document",
    [("format", str), ("version", int), ("meta", dict[str, Any]), ("fields", list[str]), ("rows", list[FLAT_ROW])],
    forbid_unknown_fields=True,
)
"""A JSON file. `rows` holds arrays, whose places `fields` names."""


def misfit(row: Any) -> str:
    """Return the name of the first field with infinity, NaN, or an integer of more than 64 bits. Empty: all are fine."""
    for name in NUMBERS:
        value = getattr(row, name)
        if value is not None and not (math.isfinite(value) if isinstance(value, float) else -LARGEST <= value <= LARGEST):
            return name
    return "" if all(map(math.isfinite, row.arrival_times_s)) else "arrival_times_s"


def flat(row: BenchRow) -> Any:
    """Return the row as the files hold it."""
    own = {name: getattr(row, name) for name in _OF_ROW}
    served = {name: getattr(row.served, name) for name in _OF_SERVED}
    times_s = [time_s for time_s, _ in row.arrivals]
    return FLAT_ROW(**own, **served, arrival_times_s=times_s, arrival_tokens=[tokens for _, tokens in row.arrivals])


def row_of(row: Any) -> BenchRow:
    """Return the row that a file holds."""
    own = {name: getattr(row, name) for name in _OF_ROW}
    served = Served(**{name: getattr(row, name) for name in _OF_SERVED})
    return BenchRow(**own, served=served, arrivals=tuple(zip(row.arrival_times_s, row.arrival_tokens, strict=True)))


# The rows of a run as parquet: one column for each field, and lists of arrivals. Only these functions load pyarrow.


_KEY: Final = b"pdserve"


def _schema() -> Any:
    """Return the schema of the columns."""
    import pyarrow as pa

    columns = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
    columns |= {list[float]: pa.list_(columns[float]), list[int]: pa.list_(columns[int])}
    return pa.schema([(name, columns[_KINDS[name]]) for name in FIELDS])


def encode_parquet(rows: Sequence[Any], meta: dict[str, Any]) -> bytes:
    """Return a file of the rows. `meta` goes into the metadata of its schema."""
    import pyarrow as pa
    import pyarrow.parquet

    head = msgspec.json.encode({"format": FORMAT, "version": VERSION, "meta": meta})
    schema = _schema().with_metadata({_KEY: head})
    table = pa.table({name: [getattr(row, name) for row in rows] for name in FIELDS}, schema=schema)
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer)
    return buffer.getvalue()


def decode_parquet(path: Path, content: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Return the meta and the rows of a file. `path` only names it in errors. Raises `RunFileError`."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        table = pa.parquet.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as exc:
        raise RunFileError(path, f"is damaged or no parquet: {exc}") from exc
    meta = _meta(path, table.schema.metadata or {})
    wanted = _schema()
    for name in FIELDS:
        index = table.schema.get_field_index(name)
        if index < 0 or table.schema.field(index).type != wanted.field(name).type:
            raise RunFileError(path, f"is not a column of {wanted.field(name).type}", field=name)
    if table.num_columns != len(FIELDS):
        raise RunFileError(path, f"are not those of version {VERSION}: {', '.join(FIELDS)}", field="columns")
    try:
        values = zip(*(table.column(name).to_pylist() for name in FIELDS), strict=True)
        return meta, [msgspec.convert(row, FLAT_ROW) for row in values]
    except (pa.ArrowException, msgspec.ValidationError, UnicodeDecodeError) as exc:
        raise RunFileError(path, f"a row is damaged: {exc}", field="rows") from exc


def _meta(path: Path, metadata: dict[bytes, bytes]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise RunFileError(path, "no `pdserve bench` wrote this file", field="metadata")
    try:
        head = msgspec.json.decode(metadata[_KEY])
        form, version, meta = head["format"], head["version"], head["meta"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise RunFileError(path, f"is damaged: {exc!r}", field="metadata") from exc
    if not isinstance(form, str) or not isinstance(version, int) or not isinstance(meta, dict):
        raise RunFileError(path, "is damaged: format, version or meta has another type", field="metadata")
    check_head(path, form, version)
    return meta
