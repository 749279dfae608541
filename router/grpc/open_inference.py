"""The Open Inference Protocol on the gRPC port: `inference.GRPCInferenceService`, as Triton's clients call it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, Final

import grpc
import grpc.aio

from pdserve.core.errors import Cancelled, PdserveError, RequestTimeout
from pdserve.core.ids import RequestId
from pdserve.rpc import status
from pdserve.rpc.malformed import LargeMessage
from pdserve.rpc.server import IDLE_MS
from pdserve.rpc.v1 import open_inference_pb2 as pb
from pdserve.rpc.v1 import open_inference_pb2_grpc
from router.api.answer import Delta, unexpected
from router.api.router_api import RouterApi
from router.choices.deliver import Delivery
from router.grpc.answer import WRITE_TIMEOUT_S, Writer
from router.grpc.calls import ClientCalls, trailing
from router.kserve.answer import Output, raw_element
from router.kserve.request import InferCall
from router.kserve.signature import SHAPE, VERSION, check_model, model_metadata, server_metadata
from router.openai.json import refuse
from router.openai.request import as_written
from router.parsing.infer import infer_call
from router.parsing.parser import Job, JobKind
from router.parsing.unparsed import leading_text

logger = logging.getLogger(__name__)

OPEN_INFERENCE: Final = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
LARGE_INFERENCES: Final = frozenset({"ModelInfer", "ModelStreamInfer"})
MAX_STREAM_REQUESTS: Final = 256
"""The most requests of one stream that run at a time, as many as a batch may have. Then none is read before one has ended."""
IDLE_S: Final = IDLE_MS / 1000  # a stream on which nothing runs ends after this, like a connection without a call
FINAL: Final = "triton_final_response"
ID_FIELD: Final = pb.ModelInferRequest.ID_FIELD_NUMBER

Received = pb.ModelInferRequest | LargeMessage | PdserveError
Send = Callable[[pb.ModelInferResponse], Awaitable[None]]


def add_open_inference(server: grpc.aio.Server, router: RouterApi, calls: ClientCalls) -> None:
    """Add the service to a server, and a refusal by name for Triton's methods that it does not have."""
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(OpenInferenceService(router, calls), server)
    server.add_generic_rpc_handlers((_Others(),))


OTHERS: Final = frozenset(
    {
        "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting",
        "LogSettings", "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    }
)  # fmt: skip
"""The methods that Triton has beyond these, from its grpc_service.proto."""


class _Others(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses Triton's other methods. gRPC's own answer would not say which one was called."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that refuses the method. None: it is none of these."""
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service != OPEN_INFERENCE or method not in OTHERS:
            return None

        async def refuse_method(_: bytes, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method}: is not implemented by pdserve")

        return grpc.unary_unary_rpc_method_handler(refuse_method, bytes, bytes)


class OpenInferenceService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The service. It knows one model of one version."""

    def __init__(self, router: RouterApi, calls: ClientCalls) -> None:
        self._router = router
        self._calls = calls

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._router.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        await self._check_model(request, context)
        return pb.ModelReadyResponse(ready=self._router.ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        await self._check_model(request, context)
        return pb.ModelMetadataResponse(**model_metadata(self._router.model_name))

    async def _check_model(self, request: pb.ModelReadyRequest | pb.ModelMetadataRequest, context: Any) -> None:
        try:
            check_model(self._router.model_name, request.name, request.version)
        except PdserveError as exc:
            await status.abort(context, exc)

    async def ModelInfer(self, request: pb.ModelInferRequest | LargeMessage, context: Any) -> pb.ModelInferResponse:
        """Run one request and return its whole answer. gRPC cancels this task when the client leaves."""
        delivery = Delivery(self._router, ends_stalled_writes=False)
        answer = pb.ModelInferResponse()

        try:
            call = await self._read(request, context)
            if call.stream:
                raise refuse("stream", "must be false or left out here: ModelStreamInfer returns more than one answer")
            with delivery, as_written(call.names):
                await self._submit(delivery, call)
                request_id = RequestId(delivery.generations[0].request_id)
                await context.send_initial_metadata(((status.REQUEST_ID_METADATA, request_id),))
                (generation,) = delivery.generations
                output = Output(call, generation.prompt_len)
                await delivery.run([output])
                context.set_trailing_metadata(trailing(generation.report))
                answer = _answer(self._router.model_name, call, output)
        except PdserveError as exc:
            await status.abort(context, exc, *trailing(delivery.failure_report))
        return answer

    async def ModelStreamInfer(self, _: Any, context: Any) -> None:
        """Run the requests of a stream side by side, and write their answers as they come. gRPC cancels this task, and with it
        all requests, when the client leaves."""
        running: set[asyncio.Task[None]] = set()
        slots = asyncio.Semaphore(MAX_STREAM_REQUESTS)
        try:
            with closing(Writer(context)) as writer:
                async with asyncio.TaskGroup() as group:
                    while (message := await _received(context, running, slots)) is not None:
                        task = group.create_task(self._answered(message, context, writer))
                        running.add(task)
                        task.add_done_callback(running.discard)
                        task.add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as exc:
            found = exc.exceptions[0]
            if not isinstance(found, PdserveError):
                raise
            await status.abort(context, found)

    async def _answered(self, message: Received, context: Any, writer: Writer) -> None:
        """Write all answers of one request of a stream, or its error. Raises `Cancelled` for a client that stopped reading, and
        ends the stream with that."""
        if isinstance(message, PdserveError):
            name = ""  # nothing of it could be read
        else:
            name = leading_text(message.data, ID_FIELD) if isinstance(message, LargeMessage) else message.id
        delivery = Delivery(self._router, ends_stalled_writes=True)

        async def send(answer: pb.ModelInferResponse) -> None:
            await _written(writer, pb.ModelStreamInferResponse(infer_response=answer))

        try:
            call = await self._read(message, context)
            name = call.id
            with delivery, as_written(call.names):
                await self._submit(delivery, call)
                (generation,) = delivery.generations
                output = Output(call, generation.prompt_len)
                await delivery.run([_StreamedAnswers(self._router.model_name, call, output, send)])
            return
        except PdserveError as exc:
            if delivery.lost_reader:
                raise
            error = exc
        except Exception:
            logger.exception("request %r of a stream failed", name)
            error = unexpected()
        failed = pb.ModelInferResponse(id=name)
        failed.parameters[FINAL].bool_param = True
        await _written(writer, pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed))

    async def _read(self, message: Received, context: Any) -> InferCall:
        """Return the request of a message. Raises a `PdserveError`."""
        if isinstance(message, PdserveError):
            raise message
        remaining_s, most_s = context.time_remaining(), self._router.max_deadline_s
        client = self._calls.client(context)
        if isinstance(message, LargeMessage):
            job = Job(
                JobKind.MODEL_INFER,
                message.data,
                self._router.max_prompt_tokens,
                call_remaining_s=remaining_s,
                max_deadline_s=most_s,
            )
            call = await self._calls.parse(job, client)
            assert isinstance(call, InferCall)
        else:
            call = infer_call(message, call_remaining_s=remaining_s, max_deadline_s=most_s)
        check_model(self._router.model_name, call.model, call.version)
        return call.of_client(client)

    async def _submit(self, delivery: Delivery, call: InferCall) -> None:
        assert call.input.request_id is not None
        await delivery.submit(call.input, (call.input.request_id,))


class _StreamedAnswers:
    """Implements `Sink`: each delta is a message of a request that streams, and the last one is that of any other."""

    is_quick = False

    def __init__(self, model: str, call: InferCall, output: Output, send: Send) -> None:
        self._model = model
        self._call = call
        self._output = output
        self._send = send

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        self._output.add(delta)
        is_final = delta.finish_reason is not None
        if not (is_final or self._call.stream):
            return
        answer = _answer(self._model, self._call, self._output)
        answer.parameters[FINAL].bool_param = is_final
        await self._send(answer)

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: gRPC has no write without a wait."""
        return False


async def _written(writer: Writer, message: pb.ModelStreamInferResponse) -> None:
    """Write a message of a stream. Raises `Cancelled` for a client that does not read it."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await writer.write(message)
    except TimeoutError:
        raise Cancelled(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from None


def _answer(model: str, call: InferCall, output: Output) -> pb.ModelInferResponse:
    """Return the message with what the output has gathered."""
    answer = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=call.id)
    values = output.values()
    for spec in call.outputs:
        answer.outputs.add(name=spec.name, datatype=spec.datatype, shape=SHAPE)
        answer.raw_output_contents.append(raw_element(values[spec.name]))
    return answer


async def _received(context: Any, running: set[asyncio.Task[None]], slots: asyncio.Semaphore) -> Received | None:
    """Return the next message of a stream, with a slot for its request. None: the client sends no more. Raises
    `RequestTimeout` for a stream on which nothing runs and nothing comes."""
    await slots.acquire()
    reading: asyncio.Task[Any] = asyncio.create_task(context.read())
    try:
        while True:
            # A read that is cancelled could lose its message, so a timeout leaves it as it is.
            done, _ = await asyncio.wait({reading}, timeout=IDLE_S)
            if done:
                message: Any = reading.result()
                return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]  # not in the stubs
            if not running:
                raise RequestTimeout(f"stream: no request came for {IDLE_S:g} s")
    finally:
        reading.cancel()
