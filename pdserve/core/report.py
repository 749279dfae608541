"""The report of one request: how it was served. The router's core makes it; fronts, logs and metrics read the same object."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.core.errors import ErrorCode, Overloaded, PdserveError
from pdserve.core.sampling import FinishReason, Placement
from pdserve.core.speculation import DraftCounts


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
    foreign: bool = False  # an engine that is not pdserve's own computed a part of it
    predicted_ttft_s: float = 0.0
    slo_class: str = ""
    ttft_met: bool | None = None
    tpot_met: bool | None = None
    cached_tokens: int | None = None  # None: no worker has reported it
    speculation: DraftCounts | None = None  # None: no worker has told of drafts

    def values(self) -> dict[str, Any]:
        """Return the fields by name. `dataclasses.asdict` would copy deeply, which takes 30 us once or twice a request."""
        return msgspec.structs.asdict(self)


# Ended requests -------------------------------------------------------------------------------------------------------
#
# One finished request as logs and metrics take it: its report, and how it ended.


class RequestRecord(msgspec.Struct, frozen=True):
    """One finished request."""

    report: Report
    outcome: str
    """A finish reason, such as "stop", or an error code, such as "replica_lost"."""
    message: str = ""
    """The error's message. Empty: there was no error."""
    refusal: str = ""
    """Why the router gave the request up while it waited, such as "shed". Empty: it did not."""

    @classmethod
    def of(cls, report: Report, end: FinishReason | PdserveError) -> RequestRecord:
        """Make the record of a request that ended with this finish reason or error."""
        if isinstance(end, FinishReason):
            return cls(report, end.value)
        return cls(report, end.code.value, str(end), end.reason if isinstance(end, Overloaded) else "")

    @property
    def missed(self) -> bool:
        """A target of the class was missed."""
        return self.report.ttft_met is False or self.report.tpot_met is False

    @property
    def counts(self) -> bool:
        """The request says something about its class. A cancelled one does so only if it had missed a target before."""
        return self.missed or self.outcome != ErrorCode.CANCELLED.value

    @property
    def good(self) -> bool:
        """The request finished, and no target was missed."""
        return not self.message and not self.missed

    def line(self) -> str:
        """Write the record as one line of `name=value` pairs for the log."""
        report = self.report
        workers = "+".join(w for w in (report.prefill_worker, report.decode_worker) if w) or "-"
        text = (
            f"request={report.request_id} outcome={self.outcome} placement={report.placement.value} "
            f"reason={report.placement_reason or '-'} workers={workers} prompt_tokens={report.prompt_tokens} "
            f"output_tokens={report.output_tokens} queue_ms={_ms(report.queue_s)} ttft_ms={_ms(report.ttft_s)} "
            f"tpot_ms={_ms(report.tpot_s)} total_ms={_ms(report.total_s)} kv_bytes={report.kv_bytes} "
            f"exposed_transfer_ms={_ms(report.exposed_transfer_s)} attempts={report.attempts} binds={report.binds}"
        )
        if report.speculation is not None:
            drafts = report.speculation
            text += f" draft_tokens={drafts.num_draft_tokens} accepted_tokens={drafts.num_accepted_tokens}"
        if report.correlation_id:
            text += f" correlation_id={report.correlation_id!r}"
        if report.slo_class:
            text += f" class={report.slo_class} missed={self.missed}"
        return f"{text} error={self.message!r}" if self.message else text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
