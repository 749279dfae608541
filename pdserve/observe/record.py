"""One finished request, as logs and metrics see it. Plain values: knows neither the router nor the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Durations in seconds. `outcome` is a finish reason ("stop", "length") or an error code ("replica_lost")."""

    request_id: str
    outcome: str
    placement: str
    placement_reason: str  # empty: never placed
    prefill_worker: str  # empty: colocated, or never got so far
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
    message: str = ""  # of the error
    retry_reasons: tuple[str, ...] = ()  # error codes: why each attempt but the first was needed
    correlation_id: str = ""  # what the client called it
    rebinds: int = 0  # decode workers lost in the handoff, whose lease another one took over

    def line(self) -> str:
        """For the log: one line, `name=value`."""
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
        return f"{text} error={self.message!r}" if self.message else text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
