"""Readers of two public formats of traces: Mooncake's JSON lines and Azure's CSV.

A malformed line raises `ConfigError` with file, line and field.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import MOST_TOKENS

BLOCK_TOKENS: Final = 512
"""The prompt tokens that one number of Mooncake's `hash_ids` stands for."""
MOST_LINE_BYTES: Final = 1 << 28
"""The longest line: a prompt of `MOST_TOKENS` ids with their commas."""
GZIP: Final = b"\x1f\x8b"
"""The first bytes of a file that gzip wrote."""
AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. Times count from the first one."""

    line: int
    """The line of the file, from 1."""
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """The number of each block of `BLOCK_TOKENS` prompt tokens, the last one mostly not full. Empty: the trace has none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace in the order of their times."""

    rows: tuple[TraceRow, ...]
    empty: int
    """The lines without prompt or answer tokens, which are left out."""
    digest: str
    """The SHA-256 of the file."""


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...]


def read_mooncake(path: Path) -> Trace:
    """Read a trace of Mooncake: a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    rows, empty = [], 0
    for number, text in json_lines(path):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise ConfigError(f"{path}, line {number}: {exc}") from exc
        if not line.input_length or not line.output_length:
            empty += 1
            continue
        if len(line.hash_ids) != (expected := -(-line.input_length // BLOCK_TOKENS)):
            raise ConfigError(
                f"{path}, line {number}: hash_ids has {len(line.hash_ids)} blocks; input_length "
                f"{line.input_length} needs {expected}"
            )
        rows.append(TraceRow(number, line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids))
    return _trace(path, rows, empty)


def read_azure(path: Path) -> Trace:
    """Read a trace of Azure: CSV with TIMESTAMP, ContextTokens and GeneratedTokens. It names no common prefixes."""
    rows, empty = [], 0
    for number, line in _csv_lines(path):
        prompt, output = (_count(path, number, field, line[field]) for field in AZURE_COLUMNS[1:])
        if prompt and output:
            rows.append(TraceRow(number, _timestamp_s(path, number, line[AZURE_COLUMNS[0]]), prompt, output))
        else:
            empty += 1
    return _trace(path, rows, empty)


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                    if line.startswith(GZIP):
                        raise ConfigError(f"{path} is compressed: unpack it, such as with gunzip")
                if len(line) > MOST_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: is longer than {MOST_LINE_BYTES} bytes")
                if line.strip():
                    yield number, line
    except OSError as exc:
        raise ConfigError(f"cannot read the workload's file {path}: {exc.strerror}") from exc


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _trace(path: Path, rows: list[TraceRow], empty: int) -> Trace:
    """Order the rows by time, and count times from the first one."""
    if not rows:
        raise ConfigError(f"{path} holds no request with prompt and answer tokens")
    rows.sort(key=lambda row: row.arrived_s)
    first_s = rows[0].arrived_s
    return Trace(
        tuple([TraceRow(row.line, row.arrived_s - first_s, row.prompt_tokens, row.output_tokens, row.blocks) for row in rows]),
        empty,
        file_digest(path),
    )


def _csv_lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the lines of a CSV file by column, with their numbers. Raises `ConfigError`."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}, line 1: the column {missing[0]} is missing")
            for line in reader:
                yield reader.line_num, line
    except OSError as exc:
        raise ConfigError(f"cannot read the workload's file {path}: {exc.strerror}") from exc
    except (UnicodeDecodeError, csv.Error) as exc:
        raise ConfigError(f"{path} is not a CSV file: {exc}") from exc


def _count(path: Path, number: int, field: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= MOST_TOKENS):
        raise ConfigError(f"{path}, line {number}: {field} must be a whole number from 0 to {MOST_TOKENS}, got {text[:40]!r}")
    return int(text)


def _timestamp_s(path: Path, number: int, text: str) -> float:
    """Return the seconds of a time with seven digits after the point, one more than Python reads."""
    whole, _, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{int(fraction or 0):0{len(fraction)}d}")
    except ValueError as exc:
        raise ConfigError(f"{path}, line {number}: {AZURE_COLUMNS[0]} must be a time, got {text[:40]!r}") from exc
