"""The core's report of a request becomes the record that logs and metrics take."""

from __future__ import annotations

from pdserve.core.errors import InternalBug, Overloaded, PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.sampling import FinishReason
from pdserve.observe.record import RequestRecord
from router.api.answer import Report


def record_of(request_id: RequestId, report: Report, outcome: FinishReason | PdserveError | None) -> RequestRecord:
    """Return the record of a request. `outcome` is its finish reason or its error. Raises `InternalBug` for None, a request
    that is done without a last token."""
    if outcome is None:
        raise InternalBug(f"request {request_id} is done without a finish reason")
    failed = isinstance(outcome, PdserveError)
    return RequestRecord(
        request_id=request_id,
        outcome=outcome.code.value if isinstance(outcome, PdserveError) else outcome.value,
        placement=report.placement.value,
        placement_reason=report.placement_reason,
        prefill_worker=report.prefill_worker,
        decode_worker=report.decode_worker,
        prompt_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        queue_s=report.queue_s,
        ttft_s=report.ttft_s,
        tpot_s=report.tpot_s,
        total_s=report.total_s,
        kv_bytes=report.kv_bytes,
        transfer_s=report.transfer_s,
        exposed_transfer_s=report.exposed_transfer_s,
        attempts=report.attempts,
        binds=report.binds,
        message=str(outcome) if failed else "",
        retry_reasons=report.retry_reasons,
        rebinds=report.rebinds,
        migrations=report.migrations,
        predicted_ttft_s=report.predicted_ttft_s,
        correlation_id=report.correlation_id,
        slo_class=report.slo_class,
        ttft_met=report.ttft_met,
        tpot_met=report.tpot_met,
        refusal=outcome.reason if isinstance(outcome, Overloaded) else "",
    )
