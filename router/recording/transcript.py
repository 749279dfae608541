"""The lines of a recording. The first line is the header; each other line is one event with its effects or its error.

```
{"pdserve_recording": 1, "pdserve": VERSION, "model_fingerprint": ..., "seed": 7, "prompts": false, "router": {settings}}
{"now_s": 12.5, "event": {"type": "Reserved", ...}, "effects": [{"type": "SendPrefill", ...}]}
{"now_s": 12.6, "event": {...}, "raised": {"type": "Overloaded", "message": ...}}
{"end": "the router stopped"}
```
The core reads no clock, and draws by its seed alone. So a replay needs only the settings, the model, the seed and the events
with their times.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Protocol

import msgspec

from pdserve import __version__
from pdserve.config import RouterConfig
from router.core import events as ev
from router.recording.codec import to_plain
from router.recording.redact import Redaction

FORMAT: Final = 1
MAGIC: Final = "pdserve_recording"

Outcome = list[ev.Effect] | Exception
"""The effects of an event, or the error that it raised."""


class Notes(Protocol):
    """A listener that gets all events of a core."""

    def note(self, now_s: float, event: ev.Event, outcome: Outcome) -> None:
        """Take one event, in order. Never blocks and never raises."""


class Transcript:
    """Writes lines, each with its line feed. It does not keep the lines that it wrote."""

    def __init__(self, config: RouterConfig, model_fingerprint: str, *, key: bytes, seed: int = 0) -> None:
        """`seed` is the core's. `key` is random and secret: salts and tickets become digests with it."""
        self._config = config
        self._model_fingerprint = model_fingerprint
        self._seed = seed
        self._redaction = Redaction(key, prompts=config.record_prompts)

    def header(self) -> bytes:
        """Return the first line."""
        settings = dataclasses.asdict(dataclasses.replace(self._config, record_file=None))
        return _line(
            {
                MAGIC: FORMAT,
                "pdserve": __version__,
                "model_fingerprint": self._model_fingerprint,
                "seed": self._seed,
                "prompts": self._config.record_prompts,
                "router": settings,
            }
        )

    def line(self, now_s: float, event: ev.Event, outcome: Outcome) -> bytes:
        """Return the line of one event."""
        hide = self._redaction.hide
        line: dict[str, Any] = {"now_s": now_s, "event": hide(to_plain(event))}
        return _line(line | outcome_to_plain(outcome, self._redaction))

    @staticmethod
    def end(why: str) -> bytes:
        """Return the last line."""
        return _line({"end": why})


def outcome_to_plain(outcome: Outcome, redaction: Redaction) -> dict[str, Any]:
    """Return the part of a line that holds the outcome of an event."""
    if isinstance(outcome, Exception):
        return {"raised": {"type": type(outcome).__name__, "message": str(outcome)}}
    return {"effects": [redaction.hide(to_plain(effect)) for effect in outcome]}


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
