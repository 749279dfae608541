"""The client of a cluster's gRPC port for asyncio. Cancelling a task cancels its request on the server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pdserve.client.blocking import DEFAULT_ADDRESS, call_timeout_s, deadline_of, read
from pdserve.client.command_line import CALL_TIMEOUT_S, OPTIONS
from pdserve.client.failures import Server, broken_stream, closed_client
from pdserve.client.params import (
    Message,
    Options,
    Prompt,
    SamplingParams,
    chat_request,
    ids_request,
    prompt_request,
    text_request,
)
from pdserve.client.results import Delta, Gathered, RequestOutput
from pdserve.client.retries import Retries
from pdserve.core.errors import Cancelled, PdserveError
from pdserve.rpc import status
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc


class AsyncStream:
    """The running answer to one request. Iterate over its deltas with `async for`, or `cancel` it from its loop.

    After an error before the first delta, the request is tried again as `Retries` says. A later error is raised, because the
    caller has a part of the text already.
    """

    def __init__(self, client: AsyncClient, request: inference_pb2.GenerateRequest) -> None:
        self._client = client
        self._request = request
        self._call: Any = None
        self._cancelled = asyncio.Event()
        self._begun = False
        self.request_id = ""
        """The router's own id of the request. It is known with the first delta."""
        self.cancel_token = ""
        """What `cancel` of any client needs beside the id. It is known with the first delta."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the request. The iteration ends with `Cancelled`, unless it has ended. Idempotent."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate once over the deltas. Raises a `PdserveError`. Closing the iterator cancels the request."""
        if self._begun:
            raise RuntimeError("an answer can be iterated over once")
        self._begun = True
        loop = asyncio.get_running_loop()
        deadline_s = deadline_of(self._request)
        ends_s = None if deadline_s is None else loop.time() + deadline_s
        attempt, given = 0, False
        while True:
            attempt += 1
            try:
                async for delta in self.attempt(ends_s):
                    given = True
                    yield delta
                return
            except PdserveError as exc:
                left_s = None if ends_s is None else ends_s - loop.time()
                wait_s = (
                    None if given or self._client.closed else self._client.retries.wait_s(exc, attempt, left_s, random.random())
                )
                if self._cancelled.is_set():
                    raise Cancelled("this client cancelled the request") from None
                if wait_s is None:
                    raise
            await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Wait before the next attempt. Raises `Cancelled`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._cancelled.wait()
        except TimeoutError:
            return
        raise Cancelled("this client cancelled the request")

    async def attempt(self, ends_s: float | None) -> AsyncIterator[Delta]:
        """Send the request once and give out its deltas. ends_s: its deadline by the loop's clock. Raises a `PdserveError`."""
        if ends_s is not None:
            self._request.deadline_s = max(1e-3, ends_s - asyncio.get_running_loop().time())
        call = self._call = self._client.begin(self._request, call_timeout_s(deadline_of(self._request)))
        ended, last = set(), -1
        try:
            async for message in call:
                if not self.request_id:
                    self._client.server.has_answered = True
                    told = dict(await call.initial_metadata())
                    self.request_id = str(told.get(status.REQUEST_ID_METADATA, message.request_id))
                    self.cancel_token = str(told.get(status.CANCEL_TOKEN_METADATA, ""))
                delta = read(message)
                last = max(last, delta.choice)
                if delta.finish_reason is not None:
                    ended.add(delta.choice)
                yield delta
        except grpc.aio.AioRpcError as exc:
            if self._client.closed and not self._cancelled.is_set():
                raise closed_client() from exc
            raise self._client.server.error_of(exc) from exc
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() > 0:  # a cancelled call raises the same error in a task that goes on
                raise
            if self._client.closed:
                raise closed_client() from None
            raise Cancelled("this client cancelled the request") from None
        finally:
            call.cancel()
        if last < 0 or len(ended) <= last:
            raise broken_stream()


class AsyncClient:
    """A client of the router at `address` (host:port of its gRPC port), for one event loop. Close it, or use `async with`.

    Errors are the server's own, such as `InvalidRequest` with its field and `Overloaded` with its `retry_after_s`.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, retries: Retries | None = None) -> None:
        """Prepare the connection, which the first call opens. Make the client where its loop runs."""
        self.address = address
        self.server = Server(address)
        self.retries = retries or Retries()
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what still runs, and close the connection. Idempotent."""
        self.closed = True
        await self._channel.close(None)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[Options]
    ) -> RequestOutput:
        """Continue a prompt, and return the whole answer. Raises a `PdserveError`."""
        return await self.run(text_request(prompt, sampling, options))

    async def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Unpack[Options]
    ) -> RequestOutput:
        """Ask for the assistant's next message, and return the whole answer. Raises a `PdserveError`."""
        return await self.run(chat_request(messages, sampling, options))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Continue a prompt, and return the running answer. The request is sent when the iteration begins."""
        return AsyncStream(self, text_request(prompt, sampling, options))

    def stream_chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Ask for the assistant's next message, and return the running answer."""
        return AsyncStream(self, chat_request(messages, sampling, options))

    async def tokenize(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a text or a chat. Raises a `PdserveError`."""
        return tuple((await self._look_up(self._stub.Tokenize, prompt_request(prompt))).ids)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Raises a `PdserveError`."""
        return str((await self._look_up(self._stub.Detokenize, ids_request(ids, skip_special_tokens))).text)

    async def cancel(self, request_id: str, cancel_token: str) -> bool:
        """Cancel a request of any client. `request_id` and `cancel_token` are those of its stream. Return False if it has ended
        or is not a request of this router. Raises a `PdserveError`."""
        request = inference_pb2.CancelRequest(request_id=request_id, cancel_token=cancel_token)
        return bool((await self._look_up(self._stub.Cancel, request)).found)

    async def model_info(self) -> inference_pb2.GetModelInfoResponse:
        """Return the name and the limits of the model that is served. Raises a `PdserveError`."""
        found: inference_pb2.GetModelInfoResponse = await self._look_up(
            self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest()
        )
        return found

    def begin(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a call. Raises `Unavailable` on a closed client."""
        if self.closed:
            raise closed_client()
        return self._stub.Generate(request, timeout=timeout_s)

    async def run(self, request: inference_pb2.GenerateRequest) -> RequestOutput:
        """Run a request to its end. It is tried again also after a part of the answer, since nobody has seen that part."""
        deadline_s = deadline_of(request)
        ends_s = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        answer: RequestOutput = await self._again(lambda: self._once(request, ends_s), ends_s)
        return answer

    async def with_prompt(self, answer: RequestOutput, request: inference_pb2.GenerateRequest) -> RequestOutput:
        """Return an answer with what the server alone knows of its prompt: the ids of a text, the text and ids of a chat."""
        if request.HasField("tokens"):
            return answer
        asked = inference_pb2.TokenizeRequest(model=request.model)
        is_chat = request.HasField("chat")
        if is_chat:
            asked.chat.CopyFrom(request.chat)
        else:
            asked.text = request.text
        ids = tuple((await self._again(lambda: self._look_up(self._stub.Tokenize, asked))).ids)
        prompt = await self._again(lambda: self.detokenize(ids)) if is_chat else answer.prompt
        return replace(answer, prompt_token_ids=ids, prompt=prompt)

    async def _again(self, make_attempt: Callable[[], Awaitable[Any]], ends_s: float | None = None) -> Any:
        """Make attempts until one succeeds or its error is final. ends_s: the deadline by the loop's clock."""
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            attempt += 1
            try:
                return await make_attempt()
            except PdserveError as exc:
                left_s = None if ends_s is None else ends_s - loop.time()
                wait_s = None if self.closed else self.retries.wait_s(exc, attempt, left_s, random.random())
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    async def _once(self, request: inference_pb2.GenerateRequest, ends_s: float | None) -> RequestOutput:
        stream, gathered = AsyncStream(self, request), Gathered()
        async for delta in stream.attempt(ends_s):
            gathered.add(delta)
        whole = gathered.whole(stream.request_id, request)
        if whole is None:
            raise broken_stream()
        return whole

    async def _look_up(self, method: Any, request: Any) -> Any:
        try:
            found = await method(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            raise self.server.error_of(exc) from exc
        except grpc.aio.UsageError:
            raise closed_client() from None
        self.server.has_answered = True
        return found
