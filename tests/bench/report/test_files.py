"""The file of a run gives back what was written, and every other file is refused by its name and field."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve_bench.report.files import Run, RunFileError, read_run, write_run
from pdserve_bench.row import BenchRow
from tests.bench.report.rows import plausible, runs

META: dict[str, Any] = {"seed": 3, "cluster": None, "workload": {"a": [1, 2.5, "ü", True]}}
SUFFIXES = pytest.mark.parametrize("suffix", [".json", ".parquet"])


@SUFFIXES
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=runs(most=5))
def test_a_run_is_read_as_it_was_written(tmp_path: Path, suffix: str, rows: tuple[BenchRow, ...]) -> None:
    path = tmp_path / f"run{suffix}"
    write_run(path, Run(rows, META))
    assert read_run(path) == Run(rows, META)


@SUFFIXES
def test_nothing_but_the_file_is_left(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    write_run(path, Run(plausible(3, 1), META))
    write_run(path, Run(plausible(4, 1), META))
    assert os.listdir(tmp_path) == [path.name]
    assert len(read_run(path).rows) == 4
    with pytest.raises(RunFileError, match="cannot be written"):
        write_run(tmp_path / "missing" / path.name, Run((), META))
    path.unlink()
    path.mkdir()  # a folder of that name cannot be replaced
    with pytest.raises(RunFileError, match="cannot be written"):
        write_run(path, Run((), META))
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"format":"pdserve-bench-run"', '"format":"other"', "format"),
        ('"version":1', '"version":2', "version"),
        ('"version":1', '"version":0', "version"),
        ('"version":1', '"version":"1"', "version"),
        ('"meta":{', '"more":1,"meta":{', ""),
        ('"planned_s"', '"planned"', "fields"),
        ("[[0,", '[["0",', "rows[0].number"),
        (",[1,1,1,1,1,1,1,1]]", ",[1,1,1,1,1,1,1]]", "rows[0]"),
        ("[1,1,1,1,1,1,1,1]]", "[1,1,1,1,1,1,null,1]]", "rows[0].arrival_tokens[6]"),
        ("[[0,", "[[", "rows[0]"),
        ("]]}", "", ""),
    ],
)
def test_a_damaged_foreign_or_newer_json_names_its_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    path = tmp_path / "run.json"
    write_run(path, Run(plausible(1, 1), META))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(RunFileError) as caught:
        read_run(path)
    assert str(path) in caught.value.message
    assert caught.value.field.startswith(field)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), suffix=st.sampled_from([".json", ".parquet"]))
def test_flipped_bytes_give_a_run_or_a_typed_error(tmp_path: Path, data: st.DataObject, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    write_run(path, Run(plausible(2, 1), META))
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        read_run(path)
    except RunFileError:
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b"PAR1", b'{"format":1}', b"[" * 100_000])
@SUFFIXES
def test_any_other_file_is_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    path.write_bytes(content)
    with pytest.raises(RunFileError, match=str(path)):
        read_run(path)


def test_parquet_of_others_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    path = tmp_path / "run.parquet"
    parquet.write_table(pa.table({"number": [1]}), path)
    with pytest.raises(RunFileError, match="metadata: no `pdserve bench` wrote"):
        read_run(path)
    head = b'{"format":"pdserve-bench-run","version":1,"meta":{}}'
    parquet.write_table(pa.table({"number": ["1"]}).replace_schema_metadata({b"pdserve": head}), path)
    with pytest.raises(RunFileError, match="number: is not a column of int64"):
        read_run(path)


@SUFFIXES
@pytest.mark.parametrize(("field", "value"), [("sent_s", float("nan")), ("ended_s", float("inf")), ("prompt_tokens", 1 << 63)])
def test_numbers_that_no_file_holds_are_refused(tmp_path: Path, suffix: str, field: str, value: float) -> None:
    row = dataclasses.replace(plausible(1, 1)[0], **{field: value})
    with pytest.raises(RunFileError) as caught:
        write_run(tmp_path / f"run{suffix}", Run((row,), META))
    assert caught.value.field == field
    assert os.listdir(tmp_path) == []
