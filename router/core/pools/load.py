"""The load of a worker: the measure by which a pool keeps its workers in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.core.events import LinkId

ASSUMED_TOKENS_PER_S: Final = 10_000.0
"""The rate of all workers of a pool in which nobody has told a rate yet. Any number gives the same order."""
NOISE_SHARE: Final = 0.25
"""Rates within this share of the pool's mean count as equal to it. One worker measures rates that differ by as much, because
prompts differ. If they counted, the fastest of equal workers would win every tie."""
DRIFT_SHARE: Final = 0.125
"""The mean that counts follows the true one when that is further away than this, since then all workers are sorted anew."""
MOST_TOKENS_PER_S: Final = 1e9
"""A rate beyond this, or one that is no number, is not known."""


class Rates:
    """The prompt rates of one pool's workers, and the mean by which they are compared. The sum is of whole thousandths, so it
    does not depend on the order of changes."""

    def __init__(self) -> None:
        self._known: dict[LinkId, int] = {}
        self._sum = 0
        self._noted = False
        self.counted_mean = 0.0
        """The mean that counts, in tokens a second. 0: no rate is known."""

    def note(self, link: LinkId, tokens_per_s: float) -> None:
        """Take in the rate of a worker; 0 stands for an unknown one, and for a worker that has left. `settle` follows."""
        rate = _thousandths(tokens_per_s)
        if rate == self._known.get(link, 0):
            return
        self._sum += rate - self._known.pop(link, 0)
        if rate:
            self._known[link] = rate
        self._noted = True

    def settle(self) -> bool:
        """Let the mean that counts follow the true one if that has drifted. True: it has changed.

        The result depends on the moments of the calls. So only the core's own questions settle, which a replay repeats.
        """
        if not self._noted:
            return False
        self._noted = False
        mean = self._mean()
        if mean == self.counted_mean or (mean and not self._drifted(mean)):
            return False
        self.counted_mean = mean
        return True

    def _mean(self) -> float:
        return self._sum / (1000 * len(self._known)) if self._known else 0.0

    def _drifted(self, mean: float) -> bool:
        return abs(mean - self.counted_mean) > DRIFT_SHARE * self.counted_mean

    def counted(self, tokens_per_s: float) -> float:
        """Return the rate that a worker's own rate counts as: the mean if it is unknown or near. 0: none is known."""
        mean = self.counted_mean
        return tokens_per_s if _thousandths(tokens_per_s) and abs(tokens_per_s - mean) > NOISE_SHARE * mean else mean

    def check_invariants(self, rates: Mapping[LinkId, float]) -> None:
        """Assert that all rates are known, and that the mean that counts was near theirs when it was settled."""
        fresh = Rates()
        for link, rate in rates.items():
            fresh.note(link, rate)
        assert (self._known, self._sum) == (fresh._known, fresh._sum)
        assert self._noted or not self._drifted(self._mean())


def _thousandths(tokens_per_s: float) -> int:
    return round(1000 * tokens_per_s) if 0 < tokens_per_s <= MOST_TOKENS_PER_S else 0


def prompt_s(tokens: int, tokens_per_s: float) -> float:
    """Return the seconds that so many prompt tokens take. A rate of 0 is not known."""
    return tokens / (tokens_per_s or ASSUMED_TOKENS_PER_S)


def decode_share(promised_tokens: int, kv_tokens: int, running: int, max_num_seqs: int) -> float:
    """Return how full a decode worker is: the larger of its share of promised KV and its share of taken slots."""
    return max(promised_tokens / kv_tokens, running / max(1, max_num_seqs))
