"""Replay: the events of a recording go to a new core, and its effects are compared with the recorded ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Final

import msgspec

from pdserve import __version__
from pdserve.config import RouterConfig
from pdserve.core.errors import InvalidRequest, PdserveError, UnknownRequest
from pdserve.observe.story import MAX_ENTRIES
from router.core import events as ev
from router.core.live_request import RequestStory, Stories
from router.core.policy import Rankings
from router.core.router_core import RouterCore
from router.recording.codec import Plain, event_from_plain
from router.recording.redact import Redaction, expand
from router.recording.transcript import FORMAT, MAGIC, Outcome, outcome_to_plain

MAX_LINE_BYTES: Final = 64 << 20
"""The most bytes of a line, which is the default size of a whole recording. An event with a prompt of a million tokens takes
8 MiB."""
MAX_STORIES: Final = 1 << 20  # a replay keeps the story of every request of a recording


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first event whose replay differs. `recorded` and `replayed` are the effects at `position`, or None where one side has
    fewer. Where one side raised, they are the whole outcomes."""

    line: int
    now_s: float
    event: Plain
    position: int
    recorded: Plain | None
    replayed: Plain | None
    request_id: str
    """The request that the difference is about. Empty: it is about none."""


@dataclasses.dataclass(slots=True)
class Replay:
    """The state and the result of a replay."""

    core: RouterCore
    recorded_by: str
    """The version of pdserve that wrote the recording."""
    events: int = 0
    end: str = ""
    """The reason why the recording ends, by its last line."""
    difference: Difference | None = None

    def story(self, name: str) -> list[RequestStory]:
        """Return the stories of a request or correlation id, the newest first. Raises `UnknownRequest`."""
        try:
            return self.core.stories_of(name)
        except UnknownRequest as exc:
            raise UnknownRequest(f"the recording has no request {name!r}", field="request_id") from exc


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. Raises `InvalidRequest` for a line that is longer than any line of a recording."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise _bad(f"a line has more than {MAX_LINE_BYTES} bytes")
        yield line


def replay(lines: Iterable[bytes], rankings_of: Callable[[RouterConfig], Rankings]) -> Replay:
    """Replay a recording up to its first difference. `rankings_of` makes the policies of the recorded settings.

    A last line that is cut off ends the recording. Raises `InvalidRequest` for anything else that is not of this format.
    """
    numbered = enumerate(lines, 1)
    header = _header(next(numbered, (1, b""))[1])
    try:
        config, fingerprint, seed = (
            RouterConfig(**header["router"]),
            str(header["model_fingerprint"]),
            int(header.get("seed", 0)),
        )
    except (KeyError, TypeError, ValueError, PdserveError) as exc:
        raise _bad(f"line 1 has no settings that this pdserve, {__version__}, takes: {exc}") from exc
    core = RouterCore(config, fingerprint, rankings_of(config), seed)
    core.requests.stories = Stories(max_stories=MAX_STORIES, max_entries=MAX_STORIES * MAX_ENTRIES)
    result = Replay(core, str(header.get("pdserve")))
    redaction = Redaction(None, prompts=bool(header.get("prompts")))
    placed: dict[int, str] = {}
    for number, line in numbered:
        if not line.endswith(b"\n"):
            result.end = f"line {number} is cut off, so the router was killed, its disk was full, or it still runs"
            return result
        read = _decode(line, number)
        if "end" in read:
            result.end = str(read["end"])
            return result
        now_s, event = _event(read, number)
        outcome = _handle(core, event, now_s)
        replayed = outcome_to_plain(outcome, redaction)
        for effect in replayed.get("effects", ()):
            if "work" in effect:
                placed[effect["work"]["handle"]] = effect["work"]["request_id"]
        recorded = _recorded(read, number)
        if recorded != replayed:
            result.difference = _difference(number, now_s, read["event"], recorded, replayed, placed)
            return result
        result.events += 1
    return result


def _handle(core: RouterCore, event: ev.Event, now_s: float) -> Outcome:
    try:
        return core.handle(event, now_s=now_s)
    except Exception as exc:  # noqa: BLE001 - whatever was raised is compared with what was recorded
        return exc


def _difference(line: int, now_s: float, event: Plain, recorded: Plain, replayed: Plain, placed: dict[int, str]) -> Difference:
    """Find the first effect that differs, and the request that it is about."""
    olds, news = _parts(recorded), _parts(replayed)
    position = next(i for i in range(max(len(olds), len(news))) if olds[i : i + 1] != news[i : i + 1])
    old, new = (parts[position] if position < len(parts) else None for parts in (olds, news))
    about = (_request_of(part, placed) for part in (old, new, event) if part is not None)
    return Difference(line, now_s, event, position, old, new, next(filter(None, about), ""))


def _parts(outcome: Plain) -> list[Plain]:
    return list(outcome["effects"]) if isinstance(outcome.get("effects"), list) else [outcome]


def _request_of(plain: Plain, placed: dict[int, str]) -> str:
    work = plain.get("work", plain)
    if not isinstance(work, dict):
        return ""
    handle = work.get("handle")
    return str(work.get("request_id") or (placed.get(handle, "") if isinstance(handle, int) else ""))


def _header(line: bytes) -> Plain:
    if line and not line.endswith(b"\n"):
        raise _bad("line 1 is cut off")
    read = _decode(line, 1) if line else {}
    if MAGIC not in read:
        raise _bad("is not a recording of pdserve: its first line has no version")
    if read[MAGIC] != FORMAT:
        writer = f"format {read[MAGIC]!r}, by pdserve {read.get('pdserve')}"
        raise _bad(f"was written in {writer}; this pdserve, {__version__}, reads format {FORMAT}")
    return read


def _decode(line: bytes, number: int) -> Plain:
    try:
        read = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise _bad(f"line {number} is not JSON: {exc}") from exc
    if not isinstance(read, dict):
        raise _bad(f"line {number} is no object")
    return read


def _event(read: Plain, number: int) -> tuple[float, ev.Event]:
    try:
        now_s = float(read["now_s"])
        if not math.isfinite(now_s):
            raise ValueError(f"now_s is {now_s}")
        return now_s, event_from_plain(expand(read["event"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as exc:
        raise _bad(f"line {number} holds no event: {exc!r}") from exc


def _recorded(read: Plain, number: int) -> Plain:
    """Return the effects of a line, or the error that its event raised."""
    outcome: Plain = {name: read[name] for name in ("effects", "raised") if name in read}
    (value,) = outcome.values() if len(outcome) == 1 else (None,)
    parts = value if isinstance(value, list) and "effects" in outcome else [value if "raised" in outcome else None]
    if not all(isinstance(part, dict) for part in parts):
        raise _bad(f"line {number} must have either a list of effects or an error that was raised")
    return outcome


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="recording")
