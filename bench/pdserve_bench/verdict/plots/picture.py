"""The whole page as one PNG, drawn by matplotlib from the same sentences and charts."""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pdserve_bench.verdict.plots import drawing
from pdserve_bench.verdict.plots.chart import WIDE_IN, Chart, Material, known
from pdserve_bench.verdict.plots.theme import Theme

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

WIDTH_IN: Final = 13.0
MARGIN_IN: Final = 0.3
LINE_IN: Final = 0.215
COLUMNS: Final = 165
"""Characters of a line of text at 10 points. The widest letters of the font still fit."""
DPI: Final = 100
PAD_IN: Final = 0.22
CARD_IN: Final = 1.05
CARDS: Final = 7


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line of text: its size in points, its weight and the name of its colour."""

    text: str
    size: float = 10.0
    bold: bool = False
    ink: str = "ink"


def png(material: Material, texts: dict[str, Any], theme: Theme) -> bytes:
    """Return the picture. texts: the content of the page. Raises `ConfigError` without matplotlib."""
    matplotlib = drawing.need_matplotlib()
    top, bottom = _head(texts), _foot(texts)
    rows = _rows(drawing.charts(material))
    cards = texts["cards"]
    heights = [
        _height(top),
        *([CARD_IN * -(-len(cards) // CARDS)] if cards else []),
        *(max(one.height for one in row) * WIDTH_IN / WIDE_IN for row in rows),
        _height(bottom),
    ]
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **theme.rc()}):
        figure = matplotlib.figure.Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        figure.get_layout_engine().set(w_pad=PAD_IN, h_pad=0.06)
        parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
        _write(parts[0], top, theme)
        if cards:
            _draw_cards(parts[1], cards, theme)
        for part, row in zip(parts[-1 - len(rows) : -1], rows, strict=True):
            for place, chart in zip(part.subfigures(1, 1 if row[0].wide else 2, squeeze=False)[0], row, strict=False):
                chart.draw(drawing.axes_of(place, chart), material, theme)
        _write(parts[-1], bottom, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _rows(found: list[Chart]) -> list[list[Chart]]:
    """Put charts of half of the width side by side. A wide chart has a row of its own."""
    wide, narrow = [one for one in found if one.wide], [one for one in found if not one.wide]
    rows = [[one] for one in wide] + [narrow[at : at + 2] for at in range(0, len(narrow), 2)]
    return sorted(rows, key=lambda row: found.index(row[0]))


def _head(texts: dict[str, Any]) -> list[PlotLine]:
    lines = [PlotLine(texts["headline"], 19, True, texts["tone"]), *_wrapped(texts["trust"], ink="muted"), PlotLine("")]
    for one in texts["reasons"]:
        lines += _wrapped(one)
    return lines


def _foot(texts: dict[str, Any]) -> list[PlotLine]:
    sections = [
        ("The binding constraint", texts["constraint"]),
        ("Changes that alter the answer", texts["flips"]),
        ("How far to trust this", [f"{'! ' if serious else ''}{one}" for serious, one in texts["doubts"]]),
        ("Conditions", [texts["effort"], *(f"{name}: {value}" for name, value in texts["conditions"])]),
    ]
    lines: list[PlotLine] = []
    for title, sentences in sections:
        if sentences:
            lines += [PlotLine(""), PlotLine(title, 12, True)]
            for one in sentences:
                lines += _wrapped(one)
    return lines


def _wrapped(text: str, ink: str = "ink") -> list[PlotLine]:
    """Break a text into lines. Characters outside of the font's alphabet become question marks."""
    broken = textwrap.wrap(known(text), COLUMNS, break_long_words=True) or [""]
    return [PlotLine(one if at == 0 else f"    {one}", ink=ink) for at, one in enumerate(broken)]


def _line_in(line: PlotLine) -> float:
    return LINE_IN * max(1.0, line.size / 10.0) if line.text else LINE_IN / 2


def _height(lines: list[PlotLine]) -> float:
    return sum(map(_line_in, lines)) + 2 * MARGIN_IN


def _write(part: SubFigure, lines: list[PlotLine], theme: Theme) -> None:
    height = _height(lines)
    at = height - MARGIN_IN
    for line in lines:
        at -= _line_in(line)
        part.text(
            MARGIN_IN / WIDTH_IN,
            at / height,
            line.text,
            fontsize=line.size,
            fontweight="bold" if line.bold else "normal",
            color=getattr(theme, line.ink),
            va="bottom",
        )


def _draw_cards(part: SubFigure, cards: list[tuple[str, str, str]], theme: Theme) -> None:
    rows = -(-len(cards) // CARDS)
    for place, (name, value, note) in enumerate(cards):
        left = (MARGIN_IN + (WIDTH_IN - 2 * MARGIN_IN) * (place % CARDS) / CARDS) / WIDTH_IN
        top = 1 - (place // CARDS) / rows
        texts = (
            (name, 9, "normal", theme.muted, 0.12),
            (value, 15, "bold", theme.ink, 0.34),
            (note, 8, "normal", theme.muted, 0.72),
        )
        for text, size, weight, ink, down in texts:
            part.text(left, top - down / rows, text, fontsize=size, fontweight=weight, color=ink, va="top")
