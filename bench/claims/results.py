"""The results file: one entry for each claim, with its samples, date, commit and machine. Every write replaces it whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.claims.figures import Figures
from pdserve_bench.report.files import write_whole

FORMAT: Final = 1


class BadResults(Exception):
    """The results file cannot be used. The message says what to do."""


@dataclass(frozen=True)
class Entry:
    """The figures of one claim, and the circumstances of their measurement. `quick` figures prove nothing and never reach a
    page."""

    date: str
    commit: str
    machine: str
    model: str
    quick: bool
    minutes: float
    figures: Figures = field(default_factory=Figures)

    def fits(self, commit: str, machine: str, model: str, *, quick: bool) -> bool:
        """Tell whether a run with these properties may take this entry over instead of measuring again.

        A commit with a plus sign may stand for different code each time, so no entry is taken over then.
        """
        return not commit.endswith("+") and (self.commit, self.machine, self.model, self.quick) == (
            commit,
            machine,
            model,
            quick,
        )


class Results:
    """All entries by the name of their claim. `put` writes the file at once, so that an interrupted run resumes."""

    def __init__(self, path: Path) -> None:
        """Read the file. A file that does not exist has no entries. Raises `BadResults`."""
        self.path = path
        self.entries: dict[str, Entry] = {}
        if path.exists():
            self.entries = _read(path)

    def put(self, name: str, entry: Entry) -> None:
        """Set one entry, and replace the file as a whole. Raises `ConfigError` when the disk refuses."""
        self.entries[name] = entry
        found = {name: asdict(one) | {"figures": one.figures.to_dict()} for name, one in sorted(self.entries.items())}
        text = json.dumps({"format": FORMAT, "claims": found}, indent=1) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, text.encode())


def _read(path: Path) -> dict[str, Entry]:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise BadResults(f"{path} has format {data['format']!r} and this command reads {FORMAT}: name another --results")
        return {name: Entry(**(one | {"figures": Figures(**one["figures"])})) for name, one in data["claims"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BadResults(f"{path} is no file of results ({exc}): delete it, or name another --results") from exc
