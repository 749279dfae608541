"""Finding stop strings in a text that arrives in pieces.

Each stop string is followed by Knuth, Morris and Pratt's automaton (1977): a character costs a step a string, whatever
the strings' lengths, so a client cannot make its request expensive with long ones. The outcome depends on the text
alone, not on how it was cut into pieces: the match that *ends* first wins, and of two ending together the longer.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Gives out text that no stop string can take back any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""  # the longest end of the text so far that begins a stop string

    def push(self, piece: str, *, honour: bool = True) -> tuple[str, bool]:
        """(text that is certain, whether a stop string was completed). The text ends before the match.

        With `honour` false, strings completed by this piece are ordinary text.
        """
        if not self._held and self._firsts.isdisjoint(piece):
            return piece, False  # no string has begun, and none begins here
        text = self._held + piece
        for index, char in enumerate(piece, start=len(self._held)):
            matched = self._step(char)
            if matched and honour:
                self._held = ""
                return text[: index + 1 - matched], True
        certain = len(text) - max(automaton.depth for automaton in self._automata)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """What is held: the text ends here, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """The length of the longest stop string that this character completes; 0 for none. All must advance."""
        return max([automaton.length if automaton.step(char) else 0 for automaton in self._automata])


class _Automaton:
    """`depth`: how many characters of the string the text now ends with, always fewer than all."""

    __slots__ = ("_borders", "_stop", "depth", "length")

    def __init__(self, stop: str) -> None:
        assert stop
        self._stop = stop
        self.length = len(stop)
        self._borders = _borders(stop)
        self.depth = 0

    def step(self, char: str) -> bool:
        """Whether this character completes the string."""
        depth = self.depth
        while depth and self._stop[depth] != char:
            depth = self._borders[depth - 1]
        depth += self._stop[depth] == char
        complete = depth == self.length
        self.depth = self._borders[depth - 1] if complete else depth
        return complete


def _borders(stop: str) -> list[int]:
    """borders[i]: length of the longest proper prefix of stop[: i + 1] that also ends it."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders
