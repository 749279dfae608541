"""The charts that a verdict has, and their drawing as SVG or into one picture."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pdserve.core.errors import ConfigError
from pdserve_bench.verdict.plots.chart import WIDE_IN, Chart, Material, shown
from pdserve_bench.verdict.plots.layouts import draw_layouts
from pdserve_bench.verdict.plots.pareto import draw_pareto
from pdserve_bench.verdict.plots.rates import draw_rates
from pdserve_bench.verdict.plots.tail import draw_tail, tails
from pdserve_bench.verdict.plots.theme import MARKED, Theme
from pdserve_bench.verdict.plots.waterfall import draw_waterfall, typical
from pdserve_bench.verdict.points import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NAMED: Final = {getattr(MARKED, name): f"var(--{name})" for name in Theme.__slots__}


def need_matplotlib() -> Any:
    """Return matplotlib. Raises `ConfigError` that says how to install it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as exc:
        raise ConfigError("a page and a picture need matplotlib: run `pip install 'pdserve[bench]'`") from exc
    return matplotlib


def charts(material: Material) -> list[Chart]:
    """Return the charts for which there is something to draw. An odd one out takes the whole width."""
    found = []
    if counted(material.result):
        found.append(Chart("rates", "Share of the requests within both targets by rate, for the best layouts", draw_rates))
        found.append(Chart("pareto", "p99 TTFT against p99 TPOT of all measured points", draw_pareto))
    if material.verdict.candidates:
        rows = len(shown(material.verdict))
        alt = "Goodput of each layout with its interval, and attainment of each at one rate"
        found.append(Chart("layouts", alt, draw_layouts, WIDE_IN, 1.3 + 0.3 * max(3, rows), 2))
    if tails(material):
        found.append(Chart("tail", "Share of the gaps between tokens that are longer than a time", draw_tail))
    if any(typical(rows) is not None for rows in material.runs.values()):
        found.append(Chart("waterfall", "Phases of one request by time", draw_waterfall, 6.2, 3.0))
    narrow = [one for one in found if not one.wide]
    if len(narrow) % 2:
        found[found.index(narrow[0])] = replace(narrow[0], width=WIDE_IN)
    return found


def axes_of(figure: Figure | SubFigure, chart: Chart) -> list[Axes]:
    """Return new axes for the panels of a chart, side by side."""
    made = figure.subplots(1, chart.panels, squeeze=False)
    return list(made[0])


def svg(chart: Chart, material: Material) -> str:
    """Return a chart as an SVG element whose colours are variables of CSS. Its ids begin with the name of the chart."""
    matplotlib = need_matplotlib()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **MARKED.rc()}):
        figure = matplotlib.figure.Figure(figsize=(chart.width, chart.height), layout="constrained")
        chart.draw(axes_of(figure, chart), material, MARKED)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return inline(buffer.getvalue(), chart)


def inline(text: str, chart: Chart) -> str:
    """Return a drawing as an element for a page: no declarations, no comments, no links to elsewhere, and ids of its own."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{chart.name}-', text)
    text = re.sub(r'xlink:href="#', f'href="#{chart.name}-', text)
    text = re.sub(r"url\(#", f"url(#{chart.name}-", text)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    for name, variable in NAMED.items():
        text = text.replace(name, variable)
    head = f'<svg role="img" aria-label="{chart.alt}" '
    text = (
        re.sub(r'^<svg width="[^"]*" height="[^"]*" ', head, text) if "width=" in text[:200] else text.replace("<svg ", head, 1)
    )
    return re.sub(r"\n\s*", "\n", text)
