"""Stories on the wire. Clocks of two machines are never compared, so each time is sent relative to one that both sides know."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.rpc.v1 import story_pb2

Entry = tuple[float, str, tuple[tuple[str, str | int | float], ...]]
"""The time of an entry in seconds, its kind, and its fields: an `Entry` of `pdserve.observe.story`, which is a tuple."""


def entries_to_wire(entries: Iterable[Entry], *, since_s: float) -> list[story_pb2.StoryEntry]:
    """Return the messages of entries, with times relative to `since_s`. Real numbers keep six significant digits."""
    return [
        story_pb2.StoryEntry(
            at_s=at_s - since_s,
            kind=kind,
            fields=[
                story_pb2.StoryField(name=name, value=f"{value:.6g}" if isinstance(value, float) else str(value))
                for name, value in fields
            ],
        )
        for at_s, kind, fields in entries
    ]


def entries_from_wire(entries: Iterable[story_pb2.StoryEntry], *, since_s: float) -> tuple[Entry, ...]:
    """Return the entries of messages, with times on the reader's clock: `since_s` is the time that they are relative to."""
    return tuple([(e.at_s + since_s, e.kind, tuple([(f.name, f.value) for f in e.fields])) for e in entries])
