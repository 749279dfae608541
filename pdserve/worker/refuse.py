"""A worker trusts its router, yet checks what would break its engine: a bad prompt must cost itself alone."""

from __future__ import annotations

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.ids import Handle
from pdserve.rpc.status import to_reason
from pdserve.rpc.v1 import link_pb2
from pdserve.worker.runtime import Host


def check_prompt(prompt: tuple[int, ...], host: Host) -> None:
    """Raises `InvalidRequest` for what the model or the pool cannot hold."""
    if not 0 < len(prompt) < host.max_model_len:
        raise InvalidRequest(f"has {len(prompt)} tokens; from 1 to {host.max_model_len - 1} are allowed", field="prompt")
    if max(prompt) >= host.card.vocab_size:
        raise InvalidRequest(f"token id {max(prompt)} is not below {host.card.vocab_size}", field="prompt")


def failed(handle: Handle, error: PdserveError) -> link_pb2.WorkerMessage:
    """Tells the router that this request ended here without an outcome."""
    return link_pb2.WorkerMessage(
        request_failed=link_pb2.RequestFailed(handle=handle, reason=to_reason(error.code), message=error.message)
    )
