"""The server's report of a request, out of its gRPC message or its JSON."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve_bench.row import Served

_PLACEMENTS = {common_pb2.PLACEMENT_DISAGGREGATED: "disaggregated", common_pb2.PLACEMENT_COLOCATED: "colocated"}


_TIMELINE = msgspec.json.Decoder(Served)


def served_of_json(report: Served, cached_prompt_tokens: int | None = None) -> Served:
    """Return what a row keeps of a report in JSON, whose other fields were ignored."""
    return replace(report, cached_prompt_tokens=cached_prompt_tokens)


def served_of_timeline(line: str | bytes) -> Served:
    """Return what a row keeps of a timeline, which answers carry in a header. A line of another form says nothing."""
    try:
        return served_of_json(_TIMELINE.decode(line))
    except msgspec.DecodeError:
        return Served()


def served_of_message(report: inference_pb2.RequestReport, usage: inference_pb2.Usage) -> Served:
    """Return what a row keeps of a report and a usage that came by gRPC."""
    return Served(
        cached_prompt_tokens=usage.cached_tokens if usage.HasField("cached_tokens") else None,
        request_id=report.request_id,
        placement=_PLACEMENTS.get(report.placement, ""),
        prefill_worker=report.prefill_worker,
        decode_worker=report.decode_worker,
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        transfer_s=report.transfer_s,
        exposed_transfer_s=report.exposed_transfer_s,
        kv_bytes=report.kv_bytes,
        attempts=report.attempts,
    )
