"""All claims, from the room `measured`. They are in the order of the page."""

from __future__ import annotations

from typing import Final

from bench.claims.claim import Claim
from bench.claims.measured import (
    batching,
    chunks,
    decode_batch,
    intensity,
    interference,
    kv_cache,
    link,
    paging,
    prefix,
    quantised,
    speculation,
)

CLAIMS: Final[tuple[Claim, ...]] = (
    decode_batch.RATES,
    batching.CLAIM,
    kv_cache.CLAIM,
    paging.CLAIM,
    decode_batch.PROMPT_STEPS,
    chunks.STALL,
    chunks.SIZE,
    prefix.CLAIM,
    quantised.KV,
    quantised.WEIGHT,
    speculation.CLAIM,
    interference.CLAIM,
    link.CLAIM,
    intensity.CLAIM,
)


def by_worth(claims: tuple[Claim, ...] = CLAIMS) -> list[Claim]:
    """Return the claims in the order of measuring: the most value a minute first."""
    return sorted(claims, key=lambda claim: -claim.value / claim.minutes)
