"""The observed values that are missing or broken. A plan from such values would be invented, so the sizes are held."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Final

from pdserve.planner.observations import DemandObserved, Observations, PoolObserved

MOST: Final = 1e15
"""No rate and no count of a cluster is larger. Sums and products of values below it stay finite."""
_DEMAND: Final = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "queued_requests", "queued_prompt_tokens")
"""The router always knows these."""
_READY_PREFILL: Final = ("queued_tokens",)
_READY_DECODE: Final = ("sequences", "kv_used")
"""Heartbeats of workers that are ready always tell these."""


def faults(observed: Observations) -> tuple[str, ...]:
    """Return a phrase for each value that is missing or broken, such as "demand.requests_per_s is missing"."""
    found: list[str] = []
    if not (_is_number(observed.now_s) and _is_number(observed.interval_s) and observed.interval_s > 0):
        found.append(f"now_s is {observed.now_s} and interval_s is {observed.interval_s}")
    parts: tuple[tuple[str, DemandObserved | PoolObserved, tuple[str, ...]], ...] = (
        ("demand", observed.demand, _DEMAND),
        ("prefill", observed.prefill, _READY_PREFILL if observed.prefill.ready > 0 else ()),
        ("decode", observed.decode, _READY_DECODE if observed.decode.ready > 0 else ()),
    )
    for name, part, needed in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if value is None and field.name in needed:
                found.append(f"{name}.{field.name} is missing")
            elif value is not None and not _is_number(value):
                found.append(f"{name}.{field.name} is {value}")
    for name in ("ttft_met", "tpot_met", "ended", "refused", "first_gap_s"):
        value = getattr(observed, name)
        if value is not None and not _is_number(value):
            found.append(f"{name} is {value}")
    for field in fields(observed.missed):
        value = getattr(observed.missed, field.name)
        if not _is_number(value):
            found.append(f"missed.{field.name} is {value}")
    return tuple(found)


def _is_number(value: float) -> bool:
    """Tell whether a value is a number that a cluster can have."""
    return math.isfinite(value) and 0 <= value <= MOST
