"""The parts of a page that are made from results: what stands between `<!-- claim:NAME begin -->` and its end. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from bench.claims.claim import Claim
from bench.claims.figures import MissingFigures
from bench.claims.results import Entry

_MARK: Final = re.compile(r"^<!-- claim:([a-z0-9-]+) (begin|end) -->$", re.MULTILINE)
_ANY: Final = re.compile(r"<!--\s*claim:.*?-->")


class BadDocument(Exception):
    """The markers of a page are not in order. The message names the line."""


def check_marks(text: str, names: Sequence[str]) -> None:
    """Check that each claim has one pair of markers and that no pair is inside another pair. Raises `BadDocument`."""
    found, opened = [], ""
    if len(_ANY.findall(text)) != len(_MARK.findall(text)):
        raise BadDocument("a marker of a claim has another form than `<!-- claim:NAME begin -->` alone on its line")
    for mark in _MARK.finditer(text):
        name, kind = mark.groups()
        line = text.count("\n", 0, mark.start()) + 1
        if kind == "begin" and not opened:
            opened = name
            found.append(name)
        elif kind == "end" and opened == name:
            opened = ""
        else:
            raise BadDocument(f"line {line}: `{mark.group()}` follows {f'the begin of {opened}' if opened else 'no begin'}")
    if opened:
        raise BadDocument(f"the begin of {opened} has no end")
    if sorted(found) != sorted(names):
        missing, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        raise BadDocument(
            f"markers: missing {missing}, unknown {unknown}, twice {sorted({n for n in found if found.count(n) > 1})}"
        )


def write(text: str, claims: Sequence[Claim], entries: Mapping[str, Entry]) -> str:
    """Return the page with new parts between its markers; the rest of it stays. Raises `BadDocument`."""
    check_marks(text, [claim.name for claim in claims])
    for claim in claims:
        begin, end = (f"<!-- claim:{claim.name} {kind} -->" for kind in ("begin", "end"))
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = f"{head}{begin}\n{part(claim, entries.get(claim.name))}\n{end}{tail}"
    return text


def part(claim: Claim, entry: Entry | None) -> str:
    """Return the part of a page about one claim: its words, the verdict, and the figures."""
    said = f"> {claim.says}\n> ({claim.source})"
    if entry is None or entry.quick:
        return f"{said}\n\n**Not measured yet.** `make bench-all` measures it."
    judgement = claim.judgement(entry.figures)
    lines = [said, f"**{judgement.verdict.value.capitalize()}.** {judgement.why} Rule: {claim.rule}"]
    try:
        lines.append(claim.table(entry.figures).markdown())
        if claim.image:
            lines.append(f"![{claim.says}](images/{claim.image}.png)")
    except MissingFigures:
        pass  # the verdict contains this already
    lines.append(f"Measured on {entry.date} at commit {entry.commit} with {entry.model}, {claim.timing}; {entry.machine}.")
    return "\n\n".join(lines)
