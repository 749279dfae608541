"""The judgement of a silent peer by evidence. Pure.

Load makes both sides late. So the time by which this process was itself late counts against nobody, and a peer that still beats
beside a silent stream lives: then only the stream may be broken, for which there is far more patience.
"""

from __future__ import annotations

from typing import Final

STUCK_S: Final = 30.0
"""A loop that has made no turn for so long hangs, and a stream on which nothing came for so long is broken. No load that was
measured held a loop for more than 3 s."""


class Silence:
    """The evidence that one side has of a silent peer."""

    def __init__(self, *, lost_s: float, due_s: float, stuck_s: float = STUCK_S) -> None:
        """A peer of which nothing is heard for `lost_s` is lost. The owner looks every `due_s`."""
        self._lost_s = lost_s
        self._due_s = due_s
        self._stuck_s = max(stuck_s, lost_s)
        self._stream_s = self._beats_s = 0.0
        self._beats = 0

    def heard(self) -> None:
        """Note that a message came on the stream, whatever it says."""
        self._stream_s = 0.0

    def look(self, passed_s: float, beats: int = 0) -> str:
        """Count the time since the last look. Return why the peer is lost, or an empty text.

        `beats` counts the beats that the peer has answered so far. A look that comes late counts as one in time: what the peer
        said meanwhile may wait to be read.
        """
        counted_s = min(passed_s, self._due_s)
        self._stream_s += counted_s
        self._beats_s = 0.0 if beats != self._beats else self._beats_s + counted_s
        self._beats = beats
        if min(self._stream_s, self._beats_s) > self._lost_s:
            return f"nothing was heard for {self._stream_s:.1f} s"
        if self._stream_s > self._stuck_s:
            return f"the stream brought nothing for {self._stream_s:.1f} s, though beats beside it were answered"
        return ""
