"""The report of one request: how it was served. The router's core makes it; fronts, logs and metrics read the same object."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.core.sampling import Placement


class Report(msgspec.Struct, frozen=True):
    """The account of how a request was served. All durations are seconds. `RequestReport` in inference.proto explains each
    field.

    A frozen dataclass would take three times as long to make.
    """

    placement: Placement
    placement_reason: str
    prompt_tokens: int
    output_tokens: int
    prefill_worker: str = ""
    decode_worker: str = ""
    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    kv_bytes: int = 0
    transfer_s: float = 0.0
    commit_s: float = 0.0
    exposed_transfer_s: float = 0.0
    attempts: int = 1
    binds: int = 1
    prefill_start_s: float = 0.0
    prefill_end_s: float = 0.0
    kv_committed_s: float = 0.0
    first_decode_s: float = 0.0
    retry_reasons: tuple[str, ...] = ()  # the error codes that made each attempt after the first necessary
    rebinds: int = 0
    migrations: int = 0  # how often it left a decode worker that was to be empty
    request_id: str = ""
    correlation_id: str = ""
    exact: bool = True
    predicted_ttft_s: float = 0.0
    slo_class: str = ""
    ttft_met: bool | None = None
    tpot_met: bool | None = None
    cached_tokens: int | None = None  # None: no worker has reported it

    def values(self) -> dict[str, Any]:
        """Return the fields by name. `dataclasses.asdict` would copy deeply, which takes 30 us once or twice a request."""
        return msgspec.structs.asdict(self)
