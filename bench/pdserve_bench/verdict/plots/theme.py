"""Colours and type of the charts. The colours can be told apart without seeing red and green (Okabe and Ito 2008)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of all charts, by what they stand for."""

    surface: str
    ink: str
    muted: str
    grid: str
    apart: str
    together: str
    good: str
    queue: str

    def rc(self) -> dict[str, Any]:
        """Return the settings of matplotlib. Texts are never read as formulas: some come from files of others."""
        return {
            "text.parse_math": False,
            "axes.facecolor": self.surface,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.labelsize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "figure.facecolor": self.surface,
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "grid.color": self.grid,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "legend.labelcolor": self.ink,
            "savefig.facecolor": self.surface,
            "svg.fonttype": "path",
            "svg.hashsalt": "pdserve",
            "text.color": self.ink,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "xtick.labelsize": 8.5,
            "ytick.labelsize": 8.5,
        }


LIGHT: Final = Theme("#ffffff", "#1f2328", "#656d76", "#d8dee4", "#0072b2", "#d55e00", "#009e73", "#8c6bb1")
DARK: Final = Theme("#0d1117", "#e6edf3", "#9198a1", "#30363d", "#56b4e9", "#e69f00", "#2bd4a4", "#b79bd9")
MARKED: Final = Theme("#fefefa", "#010203", "#010204", "#010205", "#010206", "#010207", "#010208", "#010209")
"""Colours that stand for names. A page replaces each by a variable of CSS, so that one drawing serves light and dark pages."""
