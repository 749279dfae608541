"""Several requests in one call. Each has its own answer or error, and costs the others nothing."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

from pdserve.core.errors import PdserveError
from pdserve.rpc.v1 import inference_pb2
from router.api.answer import unexpected
from router.api.router_api import RouterApi
from router.choices.together import together
from router.grpc.choices import running_of
from router.grpc.responses import error_response
from router.grpc.writer import Writer
from router.parsing.generate import GenerateCall, RefusedRequest, RequestBatch

logger = logging.getLogger(__name__)


async def run_batch(router: RouterApi, batch: RequestBatch, context: Any) -> None:
    """Run all requests of a batch and write their answers. Raises `Cancelled` for a client that stopped reading."""
    with closing(Writer(context)) as writer:
        await together([_run(router, i, call, writer) for i, call in enumerate(batch.calls)])


async def _run(router: RouterApi, index: int, call: GenerateCall | RefusedRequest, writer: Writer) -> None:
    error = call.error if isinstance(call, RefusedRequest) else await _answered(router, index, call, writer)
    if error is not None:
        await writer.write(inference_pb2.GenerateBatchResponse(index=index, error=error_response(error)))


async def _answered(router: RouterApi, index: int, call: GenerateCall, writer: Writer) -> PdserveError | None:
    """Write the answer of one request. Return its error if it fails."""

    async def send(message: inference_pb2.GenerateResponse) -> None:
        await writer.write(inference_pb2.GenerateBatchResponse(index=index, response=message))

    running = running_of(router, call)
    try:
        await running.start()
        await running.run(send)
    except PdserveError as exc:
        if running.stalled:
            raise  # the client reads nothing, so it would not read this error either
        return exc
    except Exception:
        logger.exception("request %s of a batch failed", running.request_id)
        return unexpected()
    finally:
        running.close()
    return None
