"""The router's end of the link, controlled by a test. It keeps each worker's messages in order and sends commands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.rpc import codec
from pdserve.rpc.bundle import unbundled
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, link_pb2_grpc, prefill_pb2

WAIT_S = 60.0
_END = link_pb2.RouterMessage()


class Worker:
    """One connected worker."""

    def __init__(
        self, hello: common_pb2.WorkerHello, send: Callable[[link_pb2.RouterMessage], None], changed: threading.Condition
    ) -> None:
        self.hello = hello
        self.send = send
        self.said: list[Any] = []  # all messages except heartbeats, in order
        self.heartbeat: common_pb2.WorkerLoad | None = None
        self._changed = changed

    def wait(self, kind: str, handle: int) -> Any:
        """Wait for the first message of this kind for this handle, and return it."""
        return self.until(lambda: next((m for m in self.said if _kind(m) == kind and m.handle == handle), None))

    def tokens(self, handle: int) -> list[link_pb2.StepRow]:
        """Return the rows that have come for a handle, in order."""
        rows = [row for m in list(self.said) if _kind(m) == "StepBatch" for row in m.rows]
        return [row for row in rows if row.handle == handle]

    def wait_finished(self, handle: int) -> list[link_pb2.StepRow]:
        """Wait for a handle's last row, and return all its rows."""
        self.until(lambda: any(row.finish_reason for row in self.tokens(handle)))
        return self.tokens(handle)

    def wait_empty(self) -> None:
        """Wait until a new heartbeat shows that the worker holds nothing."""
        self.heartbeat = None
        self.until(
            lambda: (
                (beat := self.heartbeat) is not None
                and beat.blocks.free + beat.blocks.cached == beat.blocks.total > 0
                and not (beat.leases_held or beat.running_sequences or beat.queued_requests or beat.blocks.unaccounted)
            )
        )

    def until(self, probe: Callable[[], Any]) -> Any:
        """Wait until `probe` returns something true, and return that. Raises `AssertionError` after `WAIT_S`."""
        with self._changed:
            assert self._changed.wait_for(probe, WAIT_S), f"not reached within {WAIT_S} s; said: {self.said}, {self.heartbeat}"
            return probe()


def _kind(message: Any) -> str:
    return type(message).__name__


def _attempt(prompt: list[int], params: SamplingParams, resumed: int) -> dict[str, Any]:
    true_len = len(prompt) - resumed
    spec = codec.spec_to_wire(RequestSpec(tuple(prompt[:true_len]), params))
    return {"spec": spec, "resumed_ids": codec.pack_ids(prompt[true_len:])}


class ScriptedRouter(link_pb2_grpc.WorkerLinkServicer):
    """Serves WorkerLink on a loop thread of its own. Use it as a context manager."""

    def __enter__(self) -> ScriptedRouter:
        self.workers: dict[str, Worker] = {}
        self._changed = threading.Condition()
        self._handle = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    async def _start(self) -> str:
        self._server = grpc.aio.server(options=server_options())
        link_pb2_grpc.add_WorkerLinkServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def Connect(
        self, messages: AsyncIterator[link_pb2.WorkerMessage], context: object
    ) -> AsyncIterator[link_pb2.RouterMessage]:
        outbound: asyncio.Queue[link_pb2.RouterMessage] = asyncio.Queue()
        hello = (await anext(aiter(messages))).hello

        def send(message: link_pb2.RouterMessage) -> None:
            self._loop.call_soon_threadsafe(outbound.put_nowait, message)

        worker = Worker(hello, send, self._changed)
        reading = asyncio.create_task(self._read(messages, worker))
        welcome = link_pb2.Welcome(router_incarnation=1)
        outbound.put_nowait(link_pb2.RouterMessage(welcome=welcome, takes_bundles=True))
        with self._changed:
            self.workers[hello.worker_id] = worker
            self._changed.notify_all()
        try:
            while (message := await outbound.get()) is not _END:
                yield message
        finally:
            reading.cancel()

    async def _read(self, messages: AsyncIterator[link_pb2.WorkerMessage], worker: Worker) -> None:
        async for message in messages:
            with self._changed:
                for one in unbundled(message):
                    body = getattr(one, one.WhichOneof("body"))
                    if isinstance(body, common_pb2.WorkerLoad):
                        worker.heartbeat = body
                    else:
                        worker.said.append(body)
                self._changed.notify_all()

    def drop(self, worker: Worker) -> None:
        """End this worker's stream, as a router that dies does."""
        del self.workers[worker.hello.worker_id]
        worker.send(_END)

    def worker(self, worker_id: str) -> Worker:
        """Wait until the worker has dialled, and return it. Raises `AssertionError` after `WAIT_S`."""
        with self._changed:
            assert self._changed.wait_for(lambda: worker_id in self.workers, WAIT_S), f"{worker_id} never dialled"
            return self.workers[worker_id]

    def flip(self, worker: Worker, role: common_pb2.Role) -> None:
        """Tell a worker to take another role."""
        worker.send(link_pb2.RouterMessage(flip=link_pb2.Flip(role=role)))

    def next_life(self, worker: Worker) -> Worker:
        """Wait until this worker has dialled as another incarnation, and return that. Raises `AssertionError`."""
        name, before = worker.hello.worker_id, worker.hello.incarnation
        with self._changed:
            found = self._changed.wait_for(lambda: self.workers[name].hello.incarnation != before, WAIT_S)
            assert found, f"{name} did not come back within {WAIT_S} s; {worker.heartbeat}"
            return self.workers[name]

    def next_handle(self) -> int:
        """Return a handle that has not been used yet."""
        self._handle += 1
        return self._handle

    def bind(
        self, worker: Worker, prompt: list[int], params: SamplingParams, *, local_prefill: bool = False, resumed: int = 0
    ) -> int:
        """Send a Bind under a new handle, and return the handle. The last `resumed` ids are output of an earlier attempt."""
        handle = self.next_handle()
        command = decode_pb2.Bind(
            handle=handle,
            deadline_s=WAIT_S,
            local_prefill=local_prefill,
            **_attempt(prompt, params, resumed),
        )
        worker.send(link_pb2.RouterMessage(bind=command))
        return handle

    def prefill(self, worker: Worker, prompt: list[int], params: SamplingParams, *, resumed: int = 0) -> int:
        """Send a Prefill under a new handle, and return the handle."""
        handle = self.next_handle()
        command = prefill_pb2.Prefill(handle=handle, **_attempt(prompt, params, resumed))
        worker.send(link_pb2.RouterMessage(prefill=command))
        return handle

    def attach(self, worker: Worker, handle: int, started: prefill_pb2.PrefillStarted) -> None:
        """Tell a decode worker to read the lease that a prefill worker granted."""
        command = decode_pb2.Attach(handle=handle, lease_id=started.lease_id, ticket=started.ticket)
        worker.send(link_pb2.RouterMessage(attach=command))

    def cancel(self, worker: Worker, handle: int) -> None:
        """Tell a worker to drop a request."""
        worker.send(link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle)))
