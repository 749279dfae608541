"""A worker trusts its router, yet checks what would break its engine: a bad prompt must cost itself alone."""

from __future__ import annotations

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.ids import Handle
from pdserve.core.sampling import SamplingParams
from pdserve.rpc import codec
from pdserve.rpc.status import to_reason
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.worker.host import Host


def read_request(prompt_ids: bytes, sampling: common_pb2.SamplingParams, host: Host) -> tuple[tuple[int, ...], SamplingParams]:
    """The prompt and parameters of a command. Raises `InvalidRequest` for what the model or the pool cannot hold."""
    try:
        prompt = codec.unpack_ids(prompt_ids)
    except ValueError as exc:
        raise InvalidRequest(str(exc), field="prompt_ids") from exc
    if not 0 < len(prompt) < host.max_model_len:
        raise InvalidRequest(f"has {len(prompt)} tokens; from 1 to {host.max_model_len - 1} are allowed", field="prompt")
    if max(prompt) >= host.card.vocab_size:
        raise InvalidRequest(f"token id {max(prompt)} is not below {host.card.vocab_size}", field="prompt")
    return prompt, codec.sampling_from_wire(sampling)


def failed(handle: Handle, error: PdserveError) -> link_pb2.WorkerMessage:
    """Tells the router that this request ended here without an outcome."""
    return link_pb2.WorkerMessage(
        request_failed=link_pb2.RequestFailed(handle=handle, reason=to_reason(error.code), message=error.message)
    )
