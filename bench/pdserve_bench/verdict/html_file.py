"""The page of a verdict: one HTML file that opens offline. It loads no script, no font and no picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve_bench.verdict import words
from pdserve_bench.verdict.data import CandidateData, VerdictData
from pdserve_bench.verdict.plots import DARK, LIGHT, Material, Theme, charts, label, svg
from pdserve_bench.verdict.units import between, number

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE: Final = "page.html"
TONES: Final = {"disaggregate": "apart", "colocate": "together", "equal": "together"}
"""The colour of the headline, by the decision. It is that of the winner in all charts; any other decision has none."""


def html(material: Material) -> str:
    """Return the page."""
    from markupsafe import Markup

    pictures = [{"name": chart.name, "wide": chart.wide, "svg": Markup(svg(chart, material))} for chart in charts(material)]
    return _environment().get_template(TEMPLATE).render(**content(material.verdict), pictures=pictures, css=Markup(colours()))


def content(verdict: VerdictData) -> dict[str, Any]:
    """Return the texts of the page, by their place in the template."""
    return {
        "headline": words.headline(verdict),
        "tone": TONES.get(verdict.decision.value, "ink"),
        "trust": words.trust(verdict),
        "reasons": words.reasons(verdict),
        "cards": words.cards(verdict),
        "constraint": words.constraint(verdict.constraint) if verdict.constraint else [],
        "flips": words.flips(verdict),
        "doubts": [(one.serious, words.doubt(one)) for one in verdict.doubts],
        "rows": [_row(one, verdict) for one in verdict.candidates],
        "conditions": list(verdict.conditions.items()),
        "effort": words.effort(verdict),
    }


def colours() -> str:
    """Return the variables of CSS for light and for dark pages."""

    def block(theme: Theme) -> str:
        return " ".join(f"--{name}: {getattr(theme, name)};" for name in Theme.__slots__)

    return f":root {{ {block(LIGHT)} }} @media (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"


def _row(one: CandidateData, verdict: VerdictData) -> dict[str, str]:
    kind = "apart" if one.layout.disaggregated else "together"
    mark = "recommended" if one == verdict.chosen else "baseline" if one == verdict.together else ""
    value = number(one.goodput.value or 0.0)
    state = "settled" if one.settled else "not settled"
    return {"kind": kind, "name": label(one), "goodput": value, "interval": between(one.goodput), "state": state, "mark": mark}


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("pdserve_bench.verdict", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
