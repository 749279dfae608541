"""The page: it stands alone, says nothing without a source, and takes texts of others as text."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import msgspec
import pytest
from click.testing import CliRunner
from results import FIGURES, degrees, layout, measured, point, result, usual

from pdserve.cli import main
from pdserve.core.errors import ConfigError
from pdserve_bench.report.files import Run, write_run
from pdserve_bench.row import BenchRow, Served
from pdserve_bench.verdict import html_file, source, units
from pdserve_bench.verdict.data import DecisionData, VerdictData
from pdserve_bench.verdict.decide import decide
from pdserve_bench.verdict.plots import (
    DARK,
    LIGHT,
    MARKED,
    MOST_ROWS,
    Material,
    charts,
    front,
    of_histogram,
    of_rows,
    phases,
    png,
    shown,
    typical,
)

HOSTILE = '\x07漢<script>alert("1")</script>{{ 7*7 }} $\\frac{1}$ </svg>\x1b[31m ' + "long " * 80
SERVED = Served(queue_s=0.05, prefill_s=0.2, transfer_s=0.08, exposed_transfer_s=0.01)
ROW = BenchRow(0, 0.0, 1.0, 1.6, 100, 4, ((1.26, 1), (1.3, 1), (1.4, 1), (1.6, 1)), served=SERVED)
CONSTANTS = {"95", "99", "16", "8"}
"""Numbers of fixed sentences: 95 % intervals, p99, the scanned range of changes, 8 bits."""
FORMATS = (units.number, units.times, units.seconds, units.size, units.tokens, units.percent)


class Seen(HTMLParser):
    """The tags, attributes and texts of a page. A tag that is not closed, or closed twice, fails."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def hostile() -> str:
    """The page of a result whose texts attack it, with a run for every chart."""
    made = replace(usual(), workload={"name": HOSTILE}, meta={"pdserve": HOSTILE, "commit": {"id": HOSTILE}})
    wild = replace(point(layout(2, 2), 5, 0.1), refused=HOSTILE)
    made = replace(made, points=(*made.points, wild))
    return html_file.html(Material(decide(made), made, {HOSTILE: (ROW,) * 5}))


def test_the_page_stands_alone_and_takes_texts_as_text(hostile):
    seen = Seen(hostile)
    assert not {"script", "link", "img", "iframe", "object", "foreignobject"} & set(seen.tags)
    assert not re.search(r"https?:|@import|javascript:", hostile)
    links = [value for name, value in seen.attributes if name in ("href", "src", "xlink:href")]
    assert links
    assert all(value.startswith("#") for value in links)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert set(links) <= {f"#{one}" for one in ids}
    text = " ".join(seen.texts)
    assert '漢<script>alert("1")</script>{{ 7*7 }} $\\frac{1}$' in text
    assert "49" not in text
    assert "\x1b" not in hostile


def test_one_drawing_serves_light_and_dark_pages(hostile):
    assert "prefers-color-scheme: dark" in hostile
    for theme in (LIGHT, DARK):
        assert all(f"--{name}: {getattr(theme, name)};" in hostile for name in theme.__slots__)
    drawn = hostile[hostile.index("<svg") :]
    assert not [one for one in MARKED.__slots__ if getattr(MARKED, one) in drawn]
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()


def numbers(value: object) -> list[float]:
    """Return all numbers of a verdict's data."""
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(map(numbers, value.values())))
    if isinstance(value, list):
        return list(itertools.chain.from_iterable(map(numbers, value)))
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def unsourced(found: VerdictData) -> set[str]:
    """Return the numbers of the page's texts that no number of the verdict is written as."""
    pattern = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?"
    values = [*numbers(found.to_dict()), float(len(found.candidates)), 0.0]
    values += [float(len(found.rivals)), *(round(one.value) for one in found.flips if one.value is not None)]
    values += [abs(one) for one in values]
    known = {part for value in values for write in FORMATS for part in re.findall(pattern, write(value))}
    texts = html_file.content(found)
    del texts["conditions"]
    said = json.dumps(texts)
    for name in sorted({one.name for one in found.candidates}, key=len, reverse=True):
        said = said.replace(name, "")
    said = re.sub(r"p\d+|\\u[0-9a-f]{4}", " ", said)
    return set(re.findall(pattern, said)) - known - CONSTANTS


CASES = {
    "usual": usual(),
    "undecided": usual(width=0.4),
    "one layout": result(measured(layout(0, 4), 3.2, 3.1, 3.3), points=(point(layout(0, 4), 3, 0.95),)),
    "no points": result(measured(layout(2, 2), 5, 4, 6), measured(layout(0, 4), 3, 2, math.inf, False)),
    "nothing serves": result(
        measured(layout(1, 1), 0, 0, 0.1), measured(layout(0, 2), 0, 0, 0.1), points=(point(layout(1, 1), 0.1, 0.0),)
    ),
    "degrees": degrees(),
    "empty": result(),
    "huge": result(
        *(measured(layout(p, 64 - p, 128), 10.0**p, 9.0**p, math.inf if p % 2 else 11.0**p) for p in range(14)),
        points=tuple(point(layout(p, 64 - p, 128), 10.0**p, 0.9, ttft_p99_s=10.0 ** (p - 7)) for p in range(14)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_the_page_is_one_of_the_verdict(name):
    found = decide(CASES[name], 3.7)
    assert unsourced(found) == set()
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_a_number_without_a_source_is_found(monkeypatch):
    from pdserve_bench.verdict import words

    monkeypatch.setattr(words, "trust", lambda _: "It is 73.1 % sure.")
    assert unsourced(decide(usual())) == {"73.1"}


@pytest.mark.parametrize("name", ["empty", "huge"])
def test_a_picture_of_any_result_is_drawn(name):
    found = decide(CASES[name])
    drawn = png(Material(found, CASES[name]), html_file.content(found), DARK)
    assert drawn.startswith(b"\x89PNG")


def test_rows_of_layouts_are_bounded_and_hold_the_best_of_both_kinds():
    found = decide(CASES["huge"])
    rows = shown(found)
    assert len(rows) == MOST_ROWS
    assert {found.apart, found.together} <= set(rows)


def test_only_charts_with_data_are_drawn():
    empty = CASES["empty"]
    assert charts(Material(decide(empty), empty)) == []
    assert {one.name for one in charts(Material(decide(usual()), usual(), {"run": (ROW,)}))} == {
        "rates", "pareto", "layouts", "tail", "waterfall",
    }  # fmt: skip


def test_the_phases_of_a_request_follow_its_clock():
    found = {one.name: (one.begin_s, one.end_s) for one in phases(ROW)}
    assert found["queue"] == pytest.approx((0.0, 0.05))
    assert found["prefill"] == pytest.approx((0.06, 0.26))
    assert found["transfer, hidden"] == pytest.approx((0.19, 0.26))
    assert found["transfer, exposed"] == pytest.approx((0.26, 0.27))
    assert found["decode"] == pytest.approx((0.27, 0.6))
    other = {one.name for one in phases(replace(ROW, served=Served()))}
    assert other == {"until the first token", "decode"}


def test_the_typical_request_was_answered_and_tells_most():
    slow = replace(ROW, number=1, ended_s=9.0)
    assert typical([replace(ROW, error="timeout"), replace(slow, served=Served()), ROW]) is ROW
    assert typical([replace(ROW, error="timeout"), replace(ROW, warm_up=True)]) is None


def test_tails_are_shares_of_longer_gaps():
    assert of_histogram(((0.01, 6), (0.02, 3), (math.inf, 1))) == ([10.0, 20.0], [0.4, pytest.approx(0.1)])
    assert of_histogram(()) == of_rows([replace(ROW, error="late")]) == ([], [])
    times, shares = of_rows([ROW])
    assert times == pytest.approx([40, 100, 200])
    assert shares == pytest.approx([2 / 3, 1 / 3, 0])


def test_no_point_of_the_front_is_beaten_by_another():
    made = [replace(FIGURES, ttft_p99_s=x, tpot_p99_s=y) for x, y in ((1, 5), (2, 2), (3, 3), (4, 1), (1, 6))]
    points = [replace(point(layout(1, 1), 1, 1.0), figures=one) for one in made]
    assert [(one.figures.ttft_p99_s, one.figures.tpot_p99_s) for one in front(points)] == [(1, 5), (2, 2), (4, 1)]


def test_the_command_writes_the_page_and_answers_by_its_status(tmp_path):
    path, run = tmp_path / "result.json", tmp_path / "run.json"
    path.write_bytes(msgspec.json.encode(usual()))
    write_run(run, Run((ROW,), {}))
    done = CliRunner().invoke(main, ["bench", "verdict", "--from", str(path), "--from", str(run), "--price-per-hour", "2"])
    assert (done.exit_code, "Disaggregate: two pools serve more" in done.output) == (0, True)
    path.write_bytes(msgspec.json.encode(CASES["undecided"]))
    done = CliRunner().invoke(main, ["bench", "verdict", "--from", str(path), "--json"])
    assert (done.exit_code, json.loads(done.output)["decision"]) == (3, DecisionData.UNDECIDED.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is damaged or no JSON"),
        (b"[]", "is no result of a search"),
        (b"\xff\xfe", "is damaged or no JSON"),
        (b'{"slo":' + b"[" * 100_000, "is damaged or no JSON"),
        (msgspec.json.encode(replace(usual(), attainment=0.0)), "attainment must be"),
        (msgspec.json.encode(replace(usual(), points=(replace(usual().points[0], attained=10**6),))), "points[0].attained"),
        (
            msgspec.json.encode(replace(usual(), points=(point(layout(1, 1), -3, 0.5),))),
            "points[0].rate_per_s must be a number from 0",
        ),
        (msgspec.json.encode(replace(usual(), points=usual().points * 300)), "points must be at most 5000"),
        (msgspec.json.encode(usual()).replace(b'"requests":400', b'"requests":' + b"9" * 400, 1), "requests must be a number"),
        (msgspec.json.encode(replace(usual(), layouts=(usual().layouts[0],) * 2)), "the same layout twice"),
        (msgspec.json.encode(replace(usual(), layouts=(measured(layout(1, 0), 1, 1, 1),))), "must be at least 1"),
    ],
)
def test_a_damaged_result_is_refused_by_its_name(tmp_path, content, said):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        source.read([path])
    assert "result.json" in caught.value.message
