"""A recording in memory: the events of a core are replayed to a new core, which must decide the same."""

from __future__ import annotations

from typing import Final

from pdserve.config import RouterConfig
from router.core import events as ev
from router.recording.replay import replay
from router.recording.transcript import Outcome, Transcript
from router.service.policies import rankings_of

KEY: Final = b"not secret: this recording is written nowhere"


class MemoryNotes:
    """Takes the events of one core, as a recorder does, and keeps the lines."""

    def __init__(self, config: RouterConfig, model_fingerprint: str, seed: int = 0) -> None:
        self._transcript = Transcript(config, model_fingerprint, key=KEY, seed=seed)
        self.lines = [self._transcript.header()]

    def note(self, now_s: float, event: ev.Event, outcome: Outcome) -> None:
        """Take one event. Implements `Notes.note`."""
        self.lines.append(self._transcript.line(now_s, event, outcome))

    def problems(self) -> list[str]:
        """Replay the events, and return the first difference in words. Empty: there is no difference."""
        result = replay(self.lines, lambda config: rankings_of(config, lambda role, reason: None))
        return [] if result.difference is None else [f"the replay of the router's events differs: {result.difference}"]
