"""Refusals of the router's commands, and checks of these. A worker trusts its router, but a bad prompt must fail alone and not
break the engine."""

from __future__ import annotations

import logging
from typing import Final

from pdserve.core.errors import InvalidRequest, NumericalError, PdserveError, Unavailable
from pdserve.core.ids import Handle
from pdserve.core.request_spec import RequestSpec
from pdserve.core.structured.constraint import FIELD
from pdserve.rpc import codec
from pdserve.rpc.status import to_reason
from pdserve.rpc.v1 import link_pb2
from pdserve.rpc.v1.decode_pb2 import Bind
from pdserve.rpc.v1.prefill_pb2 import Prefill
from pdserve.worker.host import Host
from pdserve.worker.stories import WorkKind

REFUSED_SINCE: Final = 1
"""The first version of the link's protocol that has `Refused`. An older router would wait for ever for another answer."""

log = logging.getLogger(__name__)


def read_request(command: Prefill | Bind, host: Host) -> tuple[RequestSpec, tuple[int, ...]]:
    """Return the request of a command, and the output of its earlier attempts.

    Raises `InvalidRequest` for values that the model or the pool cannot take.
    """
    try:
        spec, resumed = codec.spec_from_wire(command.spec), codec.unpack_ids(command.resumed_ids)
    except ValueError as exc:
        raise InvalidRequest(str(exc), field="prompt_ids") from exc
    prompt = spec.prompt_ids + resumed
    if not 0 < len(prompt) < host.max_model_len:
        raise InvalidRequest(f"has {len(prompt)} tokens; from 1 to {host.max_model_len - 1} are allowed", field="prompt")
    if max(prompt) >= host.card.vocab_size:
        raise InvalidRequest(f"token id {max(prompt)} is not below {host.card.vocab_size}", field="prompt")
    params = spec.sampling
    named = max((*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)), default=0)
    if named >= host.card.vocab_size:
        raise InvalidRequest(f"names token id {named}, which is not below {host.card.vocab_size}", field="sampling")
    if not len(resumed) < min(len(prompt), params.max_tokens):
        raise InvalidRequest(
            f"{len(resumed)} ids cannot be output: the prompt has {len(prompt)} ids, max_tokens is {params.max_tokens}",
            field="resumed",
        )
    return spec, resumed


def no_numbers(host: Host) -> NumericalError:
    """Make the error of a sequence whose logits were not finite numbers."""
    return NumericalError(f"the logits of a step were not finite numbers on worker {host.config.worker_id}")


def broken_grammar(reason: str) -> InvalidRequest:
    """Make the error of a sequence whose grammar cannot go on. The same request would fail anywhere."""
    return InvalidRequest(reason, field=FIELD)


def fail_foreign(host: Host, message: link_pb2.RouterMessage, role: str) -> None:
    """Answer a command that another role handles: its request fails here, and the router serves it elsewhere.

    A message that no role knows is only logged: a newer router sent it.
    """
    body = message.WhichOneof("body")
    if body not in ("prefill", "bind", "attach"):
        log.error("%s was sent %s, which this version does not know", host.config.worker_id, body)
        return
    command = getattr(message, body)
    error = Unavailable(f"{host.config.worker_id} is a {role} worker and was sent {body}")
    log.error("%s", error.message)
    host.send(failed(Handle(command.handle), error))


def fail_unstarted(host: Host, handle: Handle, request_id: str, error: PdserveError) -> None:
    """Report a request that has failed before the engine heard of it."""
    host.stories.note(request_id, WorkKind.FAILED, error=error.code, message=error.message)
    host.send(failed(handle, error))


def failed(handle: Handle, error: PdserveError, *, pair_failed: bool = False) -> link_pb2.WorkerMessage:
    """Make the message that this request has failed here. `pair_failed` True: KV did not pass from the lender to here."""
    return link_pb2.WorkerMessage(
        request_failed=link_pb2.RequestFailed(
            handle=handle, reason=to_reason(error.code), message=error.message, pair_failed=pair_failed
        )
    )


def refuse(host: Host, handle: Handle, request_id: str) -> bool:
    """Refuse a command if this worker drains, and return True. The router then places the work elsewhere at once.

    Return False, and do nothing, if the worker does not drain or the router does not know this answer.
    """
    if not host.draining or host.link_version < REFUSED_SINCE:
        return False
    host.stories.note(request_id, WorkKind.REFUSED, why="draining")
    host.send(link_pb2.WorkerMessage(refused=link_pb2.Refused(handle=handle)))
    return True
