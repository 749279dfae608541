"""One drawing in two files: for light pages, and for dark ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class LineColours:
    """The colours of lines. `dark` tells the page."""

    dark: bool
    blue: str
    orange: str
    grey: str


THEMES: Final = (LineColours(False, "#1b66c9", "#c2410c", "#4b5563"), LineColours(True, "#7cb3ff", "#ff9e64", "#a9b1bd"))


def draw_both(
    path: Path, size_in: tuple[float, float], draw: Callable[[Figure, LineColours], object], dpi: int = 110
) -> tuple[Path, Path]:
    """Draw into a file for light pages, and into one with `-dark` in its name. Return both names.

    size_in: width and height in inches. Raises `ConfigError` without matplotlib, for a name with an unknown ending, and when a
    file cannot be written.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--plot needs matplotlib: run `pip install 'pdserve[bench]'`") from exc
    light, dark = (path.with_stem(f"{path.stem}-dark") if theme.dark else path for theme in THEMES)
    for theme, file in zip(THEMES, (light, dark), strict=True):
        with style.context("dark_background" if theme.dark else "default"):
            figure = Figure(figsize=size_in, layout="constrained")
            draw(figure, theme)
            try:
                figure.savefig(file, dpi=dpi)
            except (OSError, ValueError) as exc:
                raise ConfigError(f"--plot cannot write {file}: {exc}") from exc
    return light, dark
