"""The load of a worker: the measure by which a pool keeps its workers in order. Pure."""

from __future__ import annotations

from typing import Final

ASSUMED_TOKENS_PER_S: Final = 10_000.0
"""The rate of a prefill worker that has not told its own one yet. It matters only until its first prompt is computed: nothing
waits on an idle worker, and then every rate gives the same order."""


def prompt_s(tokens: int, tokens_per_s: float) -> float:
    """Return the seconds that so many prompt tokens take. A rate of 0 is not known."""
    return tokens / (tokens_per_s or ASSUMED_TOKENS_PER_S)


def decode_share(promised_tokens: int, kv_tokens: int, running: int, max_num_seqs: int) -> float:
    """Return how full a decode worker is: the larger of its share of promised KV and its share of taken slots."""
    return max(promised_tokens / kv_tokens, running / max(1, max_num_seqs))
