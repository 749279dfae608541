"""A bidirectional stream over the fake network: both of its ends, and the connection between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from pdserve.rpc.bundle import unbundled
from sim.world.clock import SimLoop
from sim.world.network import GIVE_UP_S, Fate, Network
from sim.world.process import Process
from sim.world.server import FakeServer

Trailing = tuple[tuple[str, str], ...]


def rpc_error(code: grpc.StatusCode, details: str, trailing: Trailing = ()) -> grpc.aio.AioRpcError:
    """Make the error that grpc.aio raises for a call that ended with this status."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, details)


class Aborted(Exception):
    """The end of a call with an error status. `ServerContext.abort` raises it, as grpc.aio does."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Trailing) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing


class Inbox:
    """The messages that one end has received and not yet read. `error` says why the stream ended; None: regularly."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.error: BaseException | None = None

    def push(self, data: bytes) -> None:
        """Add a message, unless the stream has ended."""
        if not self.ended:
            self._messages.append(data)
            self._wake()

    def end(self, error: BaseException | None = None, *, discard: bool = False) -> None:
        """End the stream, once. `discard` drops the messages that were not read yet."""
        if not self.ended:
            self.ended, self.error = True, error
            if discard:
                self._messages.clear()
            self._wake()

    async def take(self) -> bytes | None:
        """Wait for the next message; None: the stream has ended."""
        while not self._messages:
            if self.ended:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamCall:
    """The client's end. Messages that are written before the connection stands are sent when it does."""

    def __init__(self, loop: SimLoop, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]) -> None:
        self.inbox = Inbox(loop)
        self.cancelled = False
        self._serialize = serialize
        self._deserialize = deserialize
        self._connection: SimConnection | None = None
        self._early: list[tuple[tuple[str, ...], bytes]] = []

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> Any:
        data = await self.inbox.take()
        if data is not None:
            return self._deserialize(data)
        if self.inbox.error is not None:
            raise self.inbox.error
        raise StopAsyncIteration

    async def write(self, message: Any) -> None:
        """Send a message. Raises InvalidStateError when the call has ended."""
        if self.inbox.ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        steps, data = steps_of(message), self._serialize(message)
        if self._connection is None:
            self._early.append((steps, data))
        else:
            self._connection.up.send(steps, data)

    def cancel(self) -> bool:
        """End the call from the client's side. False: it had ended already."""
        if self.inbox.ended:
            return False
        self.cancelled = True
        self.inbox.end(asyncio.CancelledError(), discard=True)
        if self._connection is not None:
            self._connection.hang_up()
        return True

    def connected(self, connection: SimConnection) -> None:
        """Take the connection that was opened, and send the messages that waited for it."""
        self._connection = connection
        for steps, data in self._early:
            connection.up.send(steps, data)

    def broke(self, error: BaseException) -> None:
        """End the call with an error; unread messages are lost."""
        self.inbox.end(error, discard=True)


class ServerContext:
    """The server's end of a call, as the handler sees it. A unary call has no connection, handler and loop."""

    def __init__(
        self, metadata: Any, connection: SimConnection | None = None, handler: Any = None, loop: SimLoop | None = None
    ) -> None:
        self._metadata = metadata
        self._connection = connection
        self._handler = handler
        self.inbox = Inbox(loop) if loop is not None else None

    def invocation_metadata(self) -> Any:
        """Return the metadata that the client sent."""
        return self._metadata

    def peer(self) -> str:
        """Return a name for the client; all have the same."""
        return "simulated"

    async def read(self) -> Any:
        """Wait for the client's next message; EOF: the client has ended its side."""
        assert self.inbox is not None
        data = await self.inbox.take()
        return grpc.aio.EOF if data is None else self._handler.request_deserializer(data)  # type: ignore[attr-defined]

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Drop the metadata, since nothing in the simulation reads it."""

    async def write(self, message: Any) -> None:
        """Send a message to the client."""
        assert self._connection is not None
        self._connection.down.send(steps_of(message), self._handler.response_serializer(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call with an error status. Always raises `Aborted`."""
        raise Aborted(code, details, tuple(trailing_metadata))

    async def requests(self) -> AsyncIterator[Any]:
        """Yield the client's messages until EOF."""
        while (message := await self.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            yield message


class Pipe:
    """One direction of a connection. Messages keep their order, except messages whose fate is REORDER."""

    def __init__(
        self, network: Network, src: Process, dst: Process, loss: Callable[[], float], receive: Callable[[bytes], None]
    ):
        self._network = network
        self._src = src
        self._dst = dst
        self._loss = loss
        self._receive = receive
        self._last_s = 0.0

    def send(self, steps: tuple[str, ...], data: bytes) -> None:
        """Send a message of these steps, which the network may drop, repeat or delay. A dead process sends nothing."""
        if not self._src.alive:
            return
        steps = tuple([f"tokens_of_{self._src.role}" if step == "step_batch" else step for step in steps])
        fate = self._network.fate(steps, self._src, self._dst, self._loss())
        if not self._src.alive or fate is Fate.DROP:
            return
        if fate is Fate.REORDER:  # the later messages overtake this one
            self._network.carry(steps, self._src, self._dst, data, self._network.delay_s() + 0.01, self._receive)
            return
        for _ in range(2 if fate is Fate.DUPLICATE else 1):
            self._network.carry(steps, self._src, self._dst, data, self._in_order_s(), self._receive)

    def close(self, callback: Callable[[], None]) -> None:
        """Let the end of the stream arrive, after all messages that were sent; then call back."""
        self._network.carry(("end_of_stream",), self._src, self._dst, b"", self._in_order_s(), lambda _: callback())

    def _in_order_s(self) -> float:
        now_s = self._network.timeline.now_s
        self._last_s = max(self._last_s, now_s + self._network.delay_s())
        return self._last_s - now_s


class SimConnection:
    """The connection between the two ends and the server's handler.

    It ends once: the client hangs up, the handler returns, the connection breaks, or a process dies.
    """

    def __init__(
        self,
        network: Network,
        call: StreamCall,
        client: Process,
        server: Process,
        stops_with: FakeServer,
        handler: Any,
        loss: Callable[[], float],
        metadata: Any,
    ):
        self._network = network
        self._stops_with = stops_with
        self._call = call
        self._client = client
        self._server = server
        self._handler = handler
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self.context = ServerContext(metadata, self, handler, server.loop)
        inbox = self.context.inbox
        assert inbox is not None
        self.up = Pipe(network, client, server, loss, inbox.push)
        self.down = Pipe(network, server, client, loss, call.inbox.push)
        client.on_death[self] = lambda: self._died(client, server, self._client_gone)
        server.on_death[self] = lambda: self._died(server, client, self._lost)
        network.breaking[self] = self.break_off
        stops_with.on_stop[self] = self._stopped
        self._watch()

    def start(self) -> None:
        """Start the handler. It is called on the server's loop."""
        if not self._over and self._server.alive:
            self._task = self._server.loop.create_task(self._serve())

    def hang_up(self) -> None:
        """End the connection from the client's side. The server reads EOF, and its handler is cancelled."""
        self.up.close(self._client_gone)
        self._forget()

    def break_off(self) -> None:
        """Reset the connection. Both ends learn it after a delay of the network."""
        if not self._over:
            self._client.loop.post(self._network.delay_s(), self._lost)
            self._server.loop.post(self._network.delay_s(), self._client_gone)
            self._forget()

    def _stopped(self) -> None:
        """End the connection because the server stops. Its handler is cancelled at once."""
        if not self._over:
            self._client.loop.post(self._network.delay_s(), self._lost)
            self._client_gone()
            self._forget()

    async def _serve(self) -> None:
        status: tuple[grpc.StatusCode, str, Trailing] | None = None
        try:
            await self._handler.stream_stream(self.context.requests(), self.context)
        except Aborted as exc:
            status = (exc.code, exc.details, exc.trailing)
        except asyncio.CancelledError:
            return
        except Exception as exc:  # noqa: BLE001 - a handler that raises has a bug
            self._network.timeline.errors.append(f"{self._server.name}: a stream's handler raised {exc!r}")
            status = (grpc.StatusCode.UNKNOWN, repr(exc), ())
        finally:
            self._forget()
        self.down.close(lambda: self._answered(status))

    def _answered(self, status: tuple[grpc.StatusCode, str, Trailing] | None) -> None:
        self._call.inbox.end(rpc_error(*status) if status is not None else None)

    def _died(self, dead: Process, other: Process, tell: Callable[[], None]) -> None:
        self._network.note_death(dead, other, tell)
        self._forget()

    def _client_gone(self) -> None:
        assert self.context.inbox is not None
        self.context.inbox.end()
        if self._task is not None:
            self._task.cancel()
        self._over = True

    def _lost(self) -> None:
        self._call.broke(rpc_error(grpc.StatusCode.UNAVAILABLE, "connection reset"))

    def _watch(self) -> None:
        """Look at the path from time to time, and give the connection up when the path stays cut."""
        if self._over:
            return
        if self._network.joined(self._client, self._server):
            self._network.later(GIVE_UP_S / 4, self._watch)
        else:
            self._network.later(GIVE_UP_S, self._give_up)

    def _give_up(self) -> None:
        if self._network.joined(self._client, self._server):
            self._watch()
        else:
            self.break_off()

    def _forget(self) -> None:
        self._over = True
        self._client.on_death.pop(self, None)
        self._server.on_death.pop(self, None)
        self._network.breaking.pop(self, None)
        self._stops_with.on_stop.pop(self, None)


def open_stream(
    network: Network, call: StreamCall, client: Process, process: Process, server: FakeServer, path: str, metadata: Any
) -> None:
    """Connect a call with the server's handler, unless the call has ended. Links and watches lose messages differently."""
    if call.inbox.ended:
        return
    is_link = path.endswith("/Connect")
    loss = (lambda: network.weather.link_loss) if is_link else (lambda: network.weather.watch_loss)
    connection = SimConnection(network, call, client, process, server, server.handlers[path], loss, metadata)
    process.loop.post(network.delay_s(), connection.start)
    call.connected(connection)


def steps_of(message: Any) -> tuple[str, ...]:
    """Return the names of a message in the fault matrix. A message of a link, which may be a bundle, has the names of its
    bodies; any other message has the name of its type."""
    if "body" in message.DESCRIPTOR.oneofs_by_name:
        return tuple([str(one.WhichOneof("body")) for one in unbundled(message)])
    return (str(message.DESCRIPTOR.name).lower(),)
