"""The file of a search: it comes back equal, and another search does not go on with it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.reshape import Home, WantedShape
from pdserve_bench.search.result import (
    GoodputResult,
    LayoutResult,
    Point,
    SearchFile,
    check_same,
    read_result,
    read_search,
    write_search,
)
from pdserve_bench.search.settings import SearchSettings
from tests.bench.search.servers import NO_FIGURES

LAYOUT = Layout(1, 3, 512, 64)
SETTINGS = SearchSettings(Slo(1.0, None), 4, (0, 1), (256, 512), 512, 64, first_rate_per_s=1 / 3, mean_output_tokens=128.0)
POINT = Point(LAYOUT, math.pi, 100, 91, 0.85, 0.95, 12.5, replace(NO_FIGURES, itl_histogram=((0.1, 3),)), overloaded=True)
RESULT = GoodputResult(
    SETTINGS.slo, 0.9, {"kind": "random"}, (LayoutResult(LAYOUT, 2.0, 1.9, math.inf, False),), (POINT,), False, {"seed": 3}
)
HOME = Home({"decode-0": WantedShape(Role.DECODE, 512, 64)}, {"decode-0": 17}, True)
FILE = SearchFile(SETTINGS, {"workload": "abc", "model": "tiny"}, RESULT, HOME)


def test_a_file_comes_back_equal(tmp_path: Path):
    path = tmp_path / "search.json"
    write_search(path, FILE)
    assert read_search(path) == FILE
    assert read_result(path) == RESULT


@pytest.mark.parametrize(
    ("settings", "identity", "field"),
    [
        (replace(SETTINGS, slo=Slo(2.0, None)), FILE.identity, "ttft"),
        (replace(SETTINGS, slo=Slo(1.0, 0.1)), FILE.identity, "tpot"),
        (replace(SETTINGS, attainment=0.95), FILE.identity, "attainment"),
        (replace(SETTINGS, ranks=5), FILE.identity, "ranks"),
        (replace(SETTINGS, degrees=((1, 1), (2, 2))), FILE.identity, "degrees"),
        (SETTINGS, {**FILE.identity, "workload": "other"}, "workload"),
        (SETTINGS, {"workload": "abc"}, "model"),
    ],
)
def test_a_file_of_another_search_is_refused_by_name(settings, identity, field):
    with pytest.raises(ConfigError, match=f": {field} is "):
        check_same(Path("f.json"), FILE, settings, identity)


def test_more_layouts_and_a_longer_budget_go_on():
    check_same(Path("f.json"), FILE, replace(SETTINGS, prefills=(0, 1, 2), max_point_s=300.0), FILE.identity)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": "pdserve-bench-goodput", "version": 1}', b'{"format": "x"}', b"\xff\x00"]
)
def test_a_foreign_or_damaged_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "search.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"search\.json"):
        read_search(path)


@pytest.mark.parametrize("field", ["settings", "identity", "home", "layouts", "points"])
def test_a_damaged_field_is_named(tmp_path: Path, field: str):
    import msgspec

    path = tmp_path / "search.json"
    write_search(path, FILE)
    document = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**document, field: 7}))
    with pytest.raises(ConfigError, match=field):
        read_search(path)
