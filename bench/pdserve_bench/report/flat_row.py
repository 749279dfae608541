"""One row of a run as the files hold it: fields in one fixed order, without anything nested but the arrivals. Pure."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Final

import msgspec

from pdserve_bench.row import BenchRow, Served


class FlatRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of a `BenchRow`, then those of its `Served`. The arrivals are two lists of equal length."""

    number: int
    planned_s: float
    sent_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    warm_up: bool
    slo_class: str
    session: str
    error: str
    request_id: str
    placement: str
    prefill_worker: str
    decode_worker: str
    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    exposed_transfer_s: float | None
    kv_bytes: int | None
    attempts: int | None
    cached_prompt_tokens: int | None
    arrival_times_s: list[float]
    arrival_tokens: list[int]

    def __post_init__(self) -> None:
        """Refuse arrivals without their tokens. A file that is read raises `msgspec.ValidationError`."""
        if len(self.arrival_times_s) != len(self.arrival_tokens):
            raise ValueError(
                f"{len(self.arrival_times_s)} arrival_times_s and {len(self.arrival_tokens)} arrival_tokens do not match"
            )

    def misfit(self) -> str:
        """Return the name of the first field with infinity, NaN, or an integer of more than 64 bits. Empty: all are fine."""
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) if isinstance(value, float) else -LARGEST <= value <= LARGEST):
                return name
        return "" if all(map(math.isfinite, self.arrival_times_s)) else "arrival_times_s"


FIELDS: Final = FlatRow.__struct_fields__
NUMBERS: Final = (
    *("number", "planned_s", "sent_s", "ended_s", "prompt_tokens", "output_tokens"),
    *("queue_s", "prefill_s", "transfer_s", "exposed_transfer_s", "kv_bytes", "attempts", "cached_prompt_tokens"),
)
LARGEST: Final = (1 << 63) - 1
"""The largest integer of a column in parquet."""
_OF_SERVED: Final = tuple(one.name for one in fields(Served))
_OF_ROW: Final = tuple(one.name for one in fields(BenchRow) if one.name not in ("arrivals", "served"))


def flat(row: BenchRow) -> FlatRow:
    """Return the row as the files hold it."""
    own = {name: getattr(row, name) for name in _OF_ROW}
    served = {name: getattr(row.served, name) for name in _OF_SERVED}
    times_s = [time_s for time_s, _ in row.arrivals]
    return FlatRow(**own, **served, arrival_times_s=times_s, arrival_tokens=[tokens for _, tokens in row.arrivals])


def row_of(row: FlatRow) -> BenchRow:
    """Return the row that a file holds."""
    own = {name: getattr(row, name) for name in _OF_ROW}
    served = Served(**{name: getattr(row, name) for name in _OF_SERVED})
    return BenchRow(**own, served=served, arrivals=tuple(zip(row.arrival_times_s, row.arrival_tokens, strict=True)))
