"""The gRPC API of a pdserve router as a target."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import fields
from typing import Any, Final

import grpc
import grpc.aio

from pdserve.client.command_line import NOTHING_LISTENS
from pdserve.rpc.channel import open_channel
from pdserve.rpc.status import REASON_METADATA, TIMELINE_METADATA
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pdserve_bench.load.target import (
    BAD_UTF8,
    BROKEN_STREAM,
    CONNECTION_REFUSED,
    TOO_MANY_TOKENS,
    LoadAnswer,
    LoadCall,
    RequestOptions,
    served_of_timeline,
)
from pdserve_bench.row import Served

_PLACEMENTS: Final = {
    "": common_pb2.PLACEMENT_UNSPECIFIED,
    "auto": common_pb2.PLACEMENT_AUTO,
    "disaggregated": common_pb2.PLACEMENT_DISAGGREGATED,
    "colocated": common_pb2.PLACEMENT_COLOCATED,
}
_PLACED: Final = {common_pb2.PLACEMENT_DISAGGREGATED: "disaggregated", common_pb2.PLACEMENT_COLOCATED: "colocated"}
_REPORTED: Final = tuple(one.name for one in fields(Served) if one.name not in ("placement", "cached_prompt_tokens"))
CHANNELS: Final = 4
"""The connections of a target. One connection would send all answers through one HTTP/2 window."""


class GrpcTarget:
    """The gRPC API of a router. Requests take its channels in turn. The target must be made in a running event loop."""

    def __init__(self, address: str, options: RequestOptions, *, channels: int = CHANNELS) -> None:
        self.address = address
        self._options = options
        self._channels = [open_channel(address) for _ in range(channels)]
        self._stubs = itertools.cycle([inference_pb2_grpc.InferenceStub(channel) for channel in self._channels])

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        """Send the call and fill the answer. See `Target.send`."""
        try:
            message = request_message(call, self._options)
        except UnicodeEncodeError:
            answer.error = BAD_UTF8
            return
        stream: Any = next(self._stubs).Generate(message)
        try:
            answer.error = await _read(stream, call, answer)
        except grpc.aio.AioRpcError as exc:
            answer.ended_s = time.perf_counter()
            _explain(exc, answer)
        finally:
            stream.cancel()  # does nothing to a stream that has ended

    def with_options(self, options: RequestOptions) -> GrpcTarget:
        """Return a target with other options and the same channels. To close either closes both."""
        other = copy.copy(self)
        other._options = options
        return other

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close(grace=None)


def request_message(call: LoadCall, options: RequestOptions) -> inference_pb2.GenerateRequest:
    """Return the message of a call. Raises `UnicodeEncodeError` for a text that UTF-8 cannot hold."""
    message = inference_pb2.GenerateRequest(
        model=options.model,
        sampling=common_pb2.SamplingParams(
            max_tokens=call.max_tokens, temperature=options.temperature, ignore_eos=options.ignore_eos
        ),
        slo_class=call.slo_class,
        session_id=call.session,
        cache_salt=options.cache_salt,
        placement=_PLACEMENTS[options.placement],
    )
    if isinstance(call.prompt, str):
        call.prompt.encode()  # protobuf's own error does not tell bad text from other faults
        message.text = call.prompt
    else:
        message.tokens.ids.extend(call.prompt)
    return message


async def _read(stream: Any, call: LoadCall, answer: LoadAnswer) -> str:
    """Read the stream to its end. Return the reason of a failure, or nothing."""
    end: Any = grpc.aio.EOF  # type: ignore[attr-defined]
    now, read, arrivals, ids, texts = time.perf_counter, stream.read, answer.arrivals, answer.ids, answer.texts
    while (message := await read()) is not end:
        if message.ids:
            arrivals.append((now(), len(message.ids)))
            ids.extend(message.ids)
            if len(ids) > call.max_tokens:
                return TOO_MANY_TOKENS
        if message.text:
            texts.append(message.text)
        if message.finish_reason:
            answer.ended_s = now()
            answer.prompt_tokens = message.usage.prompt_tokens
            answer.output_tokens = message.usage.output_tokens
            answer.served = served_of_message(message.report, message.usage)
            return ""
    return BROKEN_STREAM


def _explain(exc: grpc.aio.AioRpcError, answer: LoadAnswer) -> None:
    """Write the reason of a failed call, and what the router's timeline says of it."""
    metadata: Any = exc.trailing_metadata()
    trailing: dict[str, Any] = dict(metadata or ())
    answer.message = exc.details() or ""
    if exc.code() is grpc.StatusCode.UNAVAILABLE and any(sign in (exc.details() or "") for sign in NOTHING_LISTENS):
        answer.error = CONNECTION_REFUSED
    else:
        reason = trailing.get(REASON_METADATA)
        answer.error = reason[:64] if isinstance(reason, str) and reason else f"grpc_{exc.code().name.lower()}"
    if timeline := trailing.get(TIMELINE_METADATA):
        answer.served = served_of_timeline(timeline)


def served_of_message(report: inference_pb2.RequestReport, usage: inference_pb2.Usage) -> Served:
    """Return what a row keeps of a report and a usage that came by gRPC. Most fields have the same name in both."""
    return Served(
        **{name: getattr(report, name) for name in _REPORTED},
        placement=_PLACED.get(report.placement, ""),
        cached_prompt_tokens=usage.cached_tokens if usage.HasField("cached_tokens") else None,
    )
