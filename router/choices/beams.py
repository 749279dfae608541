"""Beam search: which continuations of a prompt stay after each step, and which of them are returned. Pure.

The steps are those of vLLM's server. For each live beam, the 2 x width likeliest next tokens are its candidates. A candidate
that ends with an end-of-sequence token is finished. Of the others, the `width` likeliest live on. The result is the best
`width` of those that finished and those that live at the last step.

The score is the log-probability divided by the number of output tokens, the end among them, to the power of `length_penalty`,
as in transformers. (vLLM counts the prompt's tokens too, and not the end; so equal outputs of two prompts differ in score.)
The search ends early when no live beam can get into the result any more, which never changes the result: log-probabilities are
not above 0, so a beam's can only fall.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

Candidates = Sequence[tuple[int, float]]
"""The likeliest next tokens of a beam, with their log-probabilities."""


class Beam(NamedTuple):
    """One continuation of the prompt."""

    ids: tuple[int, ...]
    logprob: float
    """The log-probability of all its tokens together."""
    ended: bool = False
    """True when the last token is an end-of-sequence token."""


class BeamSearch:
    """One search. The caller finds the candidates of each beam in `live`, and gives them to `advance`."""

    def __init__(self, width: int, max_tokens: int, *, length_penalty: float = 1.0, end_ids: Collection[int] = ()) -> None:
        """Begin with the prompt alone. Tokens in `end_ids` end a beam."""
        assert width > 0
        assert max_tokens > 0
        self.live: list[Beam] = [Beam((), 0.0)]
        """The beams that go on, best first. All have the same length. Empty: the search is over."""
        self._ended: list[Beam] = []
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_ids = frozenset(end_ids)
        self._cut: list[Beam] = []  # live at the last step

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Make one step. `candidates[i]` are those of `live[i]`."""
        live: list[Beam] = []
        for beam, top in zip(self.live, candidates, strict=True):
            for token_id, logprob in top:
                ended = token_id in self._end_ids
                (self._ended if ended else live).append(Beam((*beam.ids, token_id), beam.logprob + logprob, ended))
        self._ended = self._best(self._ended)
        live.sort(key=lambda beam: -beam.logprob)
        self.live = live[: self._width]
        if self.live and len(self.live[0].ids) == self._max_tokens:
            self._cut, self.live = self.live, []
        elif self._decided():
            self.live = []

    def result(self) -> list[Beam]:
        """Return the best beams, best first: `width` of them, or fewer if there were too few candidates."""
        assert not self.live
        return self._best(self._ended + self._cut)

    def score(self, beam: Beam) -> float:
        """Return what beams are sorted by."""
        return float(beam.logprob / len(beam.ids) ** self._length_penalty)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        """Return the best `width` beams. Of equal ones, the earlier comes first."""
        return sorted(beams, key=lambda beam: -self.score(beam))[: self._width]

    def _decided(self) -> bool:
        """Tell whether no live beam, and nothing that could follow it, can get into the result."""
        if not self.live or len(self._ended) < self._width:
            return False
        first = self.live[0]
        lengths = (len(first.ids) + 1, self._max_tokens)
        bound = float(max(first.logprob / length**self._length_penalty for length in lengths))
        return bound <= self.score(self._ended[-1])
