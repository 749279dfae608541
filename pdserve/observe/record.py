"""One finished request as logs and metrics take it: its report, and how it ended."""

from __future__ import annotations

import msgspec

from pdserve.core.errors import ErrorCode, Overloaded, PdserveError
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason


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
        if report.correlation_id:
            text += f" correlation_id={report.correlation_id!r}"
        if report.slo_class:
            text += f" class={report.slo_class} missed={self.missed}"
        return f"{text} error={self.message!r}" if self.message else text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
