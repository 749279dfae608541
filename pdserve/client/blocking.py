"""The blocking client of a cluster's gRPC port."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

import grpc

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
from pdserve.client.results import Delta, Gathered, RequestOutput, delta_of
from pdserve.client.retries import Retries
from pdserve.core.errors import Cancelled, InternalBug, PdserveError
from pdserve.rpc import status
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
GRACE_S: Final = 5.0
"""A call ends by itself so long after the request's deadline, if the server has not ended it before."""


def call_timeout_s(deadline_s: float | None) -> float | None:
    """Return the limit of a call whose request has this deadline. None: there is none, and pings find a server that hangs."""
    return None if deadline_s is None else deadline_s + GRACE_S


def deadline_of(request: inference_pb2.GenerateRequest) -> float | None:
    """Return the deadline that a request asks for. None: it asks for none."""
    return request.deadline_s if request.HasField("deadline_s") else None


def read(message: inference_pb2.GenerateResponse) -> Delta:
    """Read a message of an answer. Raises `InternalBug` for a message that makes no sense."""
    try:
        return delta_of(message)
    except (ValueError, KeyError) as exc:
        raise InternalBug(f"the server sent a message that this client cannot read: {exc}") from exc


class Stream:
    """The running answer to one request. Iterate over its deltas; any thread may `cancel` it.

    After an error before the first delta, the request is tried again as `Retries` says. A later error is raised, because the
    caller has a part of the text already.
    """

    def __init__(self, client: Client, request: inference_pb2.GenerateRequest) -> None:
        self._client = client
        self._request = request
        self._deadline_s = deadline_of(request)
        self._ends_s = None if self._deadline_s is None else time.monotonic() + self._deadline_s
        self._cancelled = threading.Event()
        self._call: Any = None
        self._begun = False
        self.request_id = ""
        """The router's own id of the request. It is known with the first delta."""
        self.cancel_token = ""
        """What `cancel` of any client needs beside the id. It is known with the first delta."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the request. The iteration ends with `Cancelled`, unless it has ended. Idempotent."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        """Iterate once over the deltas. Raises a `PdserveError`. Leaving the loop early cancels the request."""
        if self._begun:
            raise RuntimeError("an answer can be iterated over once")
        self._begun = True
        try:
            yield from self._deltas()
        finally:
            self.cancel()

    def _deltas(self) -> Iterator[Delta]:
        attempt, given = 0, False
        while True:
            attempt += 1
            try:
                for delta in self._attempt():
                    given = True
                    yield delta
                return
            except PdserveError as exc:
                left_s = None if self._ends_s is None else self._ends_s - time.monotonic()
                wait_s = (
                    None if given or self._client.closed else self._client.retries.wait_s(exc, attempt, left_s, random.random())
                )
                if self._cancelled.is_set() or (wait_s is not None and self._cancelled.wait(wait_s)):
                    raise Cancelled("this client cancelled the request") from None
                if wait_s is None:
                    raise

    def _attempt(self) -> Iterator[Delta]:
        """Send the request once and give out its deltas. Raises a `PdserveError`."""
        if self._ends_s is not None:
            self._request.deadline_s = max(1e-3, self._ends_s - time.monotonic())
        call = self._client.begin(self._request, call_timeout_s(deadline_of(self._request)))
        self._call = call
        if self._cancelled.is_set():  # the cancel may have come before the call
            call.cancel()
        ended, last = set(), -1
        try:
            for message in call:
                if not self.request_id:
                    self._client.server.has_answered = True
                    told = dict(call.initial_metadata())
                    self.request_id = str(told.get(status.REQUEST_ID_METADATA, message.request_id))
                    self.cancel_token = str(told.get(status.CANCEL_TOKEN_METADATA, ""))
                delta = read(message)
                last = max(last, delta.choice)
                if delta.finish_reason is not None:
                    ended.add(delta.choice)
                yield delta
        except grpc.RpcError as exc:
            if self._client.closed and not self._cancelled.is_set():
                raise closed_client() from exc
            raise self._client.server.error_of(exc) from exc
        finally:
            call.cancel()
        if last < 0 or len(ended) <= last:
            raise broken_stream()


class Client:
    """A client of the router at `address` (host:port of its gRPC port). Threads may share it. Close it, or use `with`.

    ```
    with Client() as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=32)).text)
    ```
    Errors are the server's own, such as `InvalidRequest` with its field and `Overloaded` with its `retry_after_s`.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, retries: Retries | None = None) -> None:
        """Prepare the connection, which the first call opens. `retries`: the rule by which errors are tried again."""
        self.address = address
        self.server = Server(address)
        self.retries = retries or Retries()
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs, and close the connection. Idempotent."""
        self.closed = True
        self._channel.close()

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[Options]) -> RequestOutput:
        """Continue a prompt, and return the whole answer. Raises a `PdserveError`."""
        return self._whole(text_request(prompt, sampling, options))

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Unpack[Options]
    ) -> RequestOutput:
        """Ask for the assistant's next message, and return the whole answer. Raises a `PdserveError`."""
        return self._whole(chat_request(messages, sampling, options))

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[Options]) -> Stream:
        """Continue a prompt, and return the running answer. The request is sent when the iteration begins."""
        return Stream(self, text_request(prompt, sampling, options))

    def stream_chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Ask for the assistant's next message, and return the running answer."""
        return Stream(self, chat_request(messages, sampling, options))

    def tokenize(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a text or a chat. Raises a `PdserveError`."""
        return tuple(self._look_up(self._stub.Tokenize, prompt_request(prompt)).ids)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Raises a `PdserveError`."""
        return str((self._look_up(self._stub.Detokenize, ids_request(ids, skip_special_tokens))).text)

    def cancel(self, request_id: str, cancel_token: str) -> bool:
        """Cancel a request of any client. `request_id` and `cancel_token` are those of its stream. Return False if it has ended
        or is not a request of this router. Raises a `PdserveError`."""
        request = inference_pb2.CancelRequest(request_id=request_id, cancel_token=cancel_token)
        return bool((self._look_up(self._stub.Cancel, request)).found)

    def model_info(self) -> inference_pb2.GetModelInfoResponse:
        """Return the name and the limits of the model that is served. Raises a `PdserveError`."""
        found: inference_pb2.GetModelInfoResponse = self._look_up(self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest())
        return found

    def begin(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a call. Raises `Unavailable` on a closed client."""
        try:
            return self._stub.Generate(request, timeout=timeout_s)
        except ValueError:
            raise closed_client() from None

    def _whole(self, request: inference_pb2.GenerateRequest) -> RequestOutput:
        """Run a request to its end. It is tried again also after a part of the answer, since nobody has seen that part."""
        deadline_s = deadline_of(request)
        ends_s = None if deadline_s is None else time.monotonic() + deadline_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._once(request)
            except PdserveError as exc:
                left_s = None if ends_s is None else ends_s - time.monotonic()
                wait_s = None if self.closed else self.retries.wait_s(exc, attempt, left_s, random.random())
                if wait_s is None:
                    raise
            time.sleep(wait_s)
            if ends_s is not None:
                request.deadline_s = max(1e-3, ends_s - time.monotonic())

    def _once(self, request: inference_pb2.GenerateRequest) -> RequestOutput:
        stream, gathered = Stream(self, request), Gathered()
        for delta in stream._attempt():
            gathered.add(delta)
        whole = gathered.whole(stream.request_id, request)
        if whole is None:
            raise broken_stream()
        return whole

    def _look_up(self, method: Any, request: Any) -> Any:
        try:
            found = method(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise self.server.error_of(exc) from exc
        except ValueError:
            raise closed_client() from None
        self.server.has_answered = True
        return found
