"""The metrics of classes of requests: which targets were met, which requests were good, and which were refused.

Goodput is the rate of good requests: those that finished and missed no target of their class.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdserve.observe.record import RequestRecord

ERROR_S: Final = (-2.5, -1.0, -0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WORDS: Final = {True: "met", False: "missed", None: "none"}


class SloMetrics:
    """The counters of classes in the registry of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pdserve_slo_requests",
            "Ended requests by class and by target: met, missed, or none.",
            ["slo_class", "ttft", "tpot"],
            registry=registry,
        )
        self._good = Counter(
            "pdserve_slo_good_requests", "Requests that finished and missed no target.", ["slo_class"], registry=registry
        )
        self._refused = Counter(
            "pdserve_slo_refused_requests",
            "Requests refused at submit or shed from the queue, by class and reason.",
            ["slo_class", "reason"],
            registry=registry,
        )

        self._prediction_error = Histogram(
            "pdserve_ttft_prediction_error_seconds",
            "Measured less predicted TTFT of requests that were served in one attempt. Above 0: later than predicted.",
            ["slo_class"],
            buckets=ERROR_S,
            registry=registry,
        )

    def finished(self, record: RequestRecord) -> None:
        """Count one ended request."""
        report = record.report
        if report.predicted_ttft_s and report.output_tokens and report.attempts == 1:
            self._prediction_error.labels(report.slo_class).observe(report.ttft_s - report.predicted_ttft_s)
        if record.refusal:
            self._refused.labels(report.slo_class, record.refusal).inc()
        if record.counts:
            self._requests.labels(report.slo_class, _WORDS[report.ttft_met], _WORDS[report.tpot_met]).inc()
            if record.good:
                self._good.labels(report.slo_class).inc()

    def refused(self, slo_class: str, reason: str) -> None:
        """Count one request that was refused at submit."""
        self._refused.labels(slo_class, reason).inc()
