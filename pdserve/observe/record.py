"""The record of one finished request, for logs and metrics. It holds plain values and knows neither router nor wire."""

from __future__ import annotations

import msgspec

from pdserve.core.errors import ErrorCode


class RequestRecord(msgspec.Struct, frozen=True):
    """One finished request. All durations are seconds. A frozen dataclass would take three times as long to make."""

    request_id: str
    outcome: str  # a finish reason ("stop", "length") or an error code ("replica_lost")
    placement: str
    placement_reason: str  # empty: the request was never placed
    prefill_worker: str  # empty: the request was colocated, or ended before it had a prefill worker
    decode_worker: str
    prompt_tokens: int
    output_tokens: int
    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float
    kv_bytes: int
    transfer_s: float
    exposed_transfer_s: float
    attempts: int
    binds: int
    message: str = ""  # the error's message; empty: no error
    retry_reasons: tuple[str, ...] = ()  # the error code that made each further attempt necessary
    correlation_id: str = ""  # the client's own name of the request
    rebinds: int = 0  # how many times a decode worker was lost in the handoff and another one took over the lease
    migrations: int = 0  # how many times it left a worker that was to be empty
    slo_class: str = ""
    ttft_met: bool | None = None  # None: the class has no such target, or the request was cancelled before it could be missed
    tpot_met: bool | None = None
    predicted_ttft_s: float = 0.0  # ttft_s as it was foreseen at arrival; 0: without a target, or nobody knew
    refusal: str = ""  # why the router gave the request up while it waited, such as "shed"; empty: it did not

    @property
    def missed(self) -> bool:
        """A target of the class was missed."""
        return self.ttft_met is False or self.tpot_met is False

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
        workers = "+".join(w for w in (self.prefill_worker, self.decode_worker) if w) or "-"
        text = (
            f"request={self.request_id} outcome={self.outcome} placement={self.placement} "
            f"reason={self.placement_reason or '-'} workers={workers} prompt_tokens={self.prompt_tokens} "
            f"output_tokens={self.output_tokens} queue_ms={_ms(self.queue_s)} ttft_ms={_ms(self.ttft_s)} "
            f"tpot_ms={_ms(self.tpot_s)} total_ms={_ms(self.total_s)} kv_bytes={self.kv_bytes} "
            f"exposed_transfer_ms={_ms(self.exposed_transfer_s)} attempts={self.attempts} binds={self.binds}"
        )
        if self.correlation_id:
            text += f" correlation_id={self.correlation_id!r}"
        if self.slo_class:
            text += f" class={self.slo_class} missed={self.missed}"
        return f"{text} error={self.message!r}" if self.message else text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
