"""The rows of a run as parquet: one column for each field, and lists of arrivals. pyarrow is loaded only here."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.report.files import FORMAT, VERSION, RunFileError, check_head
from pdserve_bench.report.flat_row import FIELDS, FlatRow

_KEY: Final = b"pdserve"


def _types(pa: Any) -> Any:
    """Return the schema of the columns."""
    whole, seconds, text = pa.int64(), pa.float64(), pa.string()
    kinds = {"warm_up": pa.bool_(), "arrival_times_s": pa.list_(seconds), "arrival_tokens": pa.list_(whole)}
    kinds |= dict.fromkeys(
        ("slo_class", "session", "error", "request_id", "placement", "prefill_worker", "decode_worker"), text
    )
    return pa.schema([(name, kinds.get(name, seconds if name.endswith("_s") else whole)) for name in FIELDS])


def _pyarrow() -> Any:
    """Load pyarrow. Raises `ConfigError` where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise ConfigError("parquet needs pyarrow: run `pip install 'pdserve[bench]'`, or name the file *.json") from exc
    return pyarrow


def check_installed() -> None:
    """Raise `ConfigError` where pyarrow is not installed."""
    _pyarrow()


def encode(rows: Sequence[FlatRow], meta: dict[str, Any]) -> bytes:
    """Return a file of the rows. `meta` goes into the metadata of its schema."""
    pa = _pyarrow()
    head = msgspec.json.encode({"format": FORMAT, "version": VERSION, "meta": meta})
    schema = _types(pa).with_metadata({_KEY: head})
    table = pa.table({name: [getattr(row, name) for row in rows] for name in FIELDS}, schema=schema)
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer)
    return buffer.getvalue()


def decode(path: Path, content: bytes) -> tuple[dict[str, Any], list[FlatRow]]:
    """Return the meta and the rows of a file. `path` only names it in errors. Raises `RunFileError`."""
    pa = _pyarrow()
    try:
        table = pa.parquet.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as exc:
        raise RunFileError(path, f"is damaged or no parquet: {exc}") from exc
    meta = _meta(path, table.schema.metadata or {})
    wanted = _types(pa)
    for name in FIELDS:
        index = table.schema.get_field_index(name)
        if index < 0 or table.schema.field(index).type != wanted.field(name).type:
            raise RunFileError(path, f"is not a column of {wanted.field(name).type}", field=name)
    if table.num_columns != len(FIELDS):
        raise RunFileError(path, f"are not those of version {VERSION}: {', '.join(FIELDS)}", field="columns")
    try:
        values = zip(*(table.column(name).to_pylist() for name in FIELDS), strict=True)
        return meta, [msgspec.convert(row, FlatRow) for row in values]
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
