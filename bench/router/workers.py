"""A prefill and a decode worker without engines, fast enough to flood a router.

They speak the link as real workers do: token 0 of a request comes from prefill, the rest from decode after its Attach.
`testkit.fake_worker` computes each token when it is due. Here the requests of all streams form a wave: all its StepBatches are
made and serialised before the first is sent, so that tokens wait for the flooded router and not for its worker. Messages that
wait travel as a bundle, as `pdserve.worker.link` sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from bench.router.peer_config import PeerConfig, text_of
from pdserve.rpc.bundle import MAX_BUNDLE_MESSAGES, unbundled
from pdserve.rpc.status import CLUSTER_TOKEN_METADATA
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, prefill_pb2

HEARTBEAT_S: Final = 1.0
_CONNECT: Final = "/pdserve.rpc.v1.WorkerLink/Connect"
_BLOCKS: Final = 1 << 16  # KV is not measured, so there is always room
_BLOCK_SIZE: Final = 16


class _Worker:
    """One scripted worker, with its link to the router."""

    def __init__(self, config: PeerConfig, role: common_pb2.Role, name: str) -> None:
        self._config = config
        self._role = role
        self._name = name
        self._outbound: asyncio.Queue[bytes] = asyncio.Queue()
        self._binds: dict[int, decode_pb2.Bind] = {}
        self._wave: list[decode_pb2.Bind] = []
        self._bundles = False
        self.welcomed = asyncio.Event()

    async def run(self) -> None:
        config = self._config
        async with grpc.aio.insecure_channel(config.link) as channel, asyncio.TaskGroup() as group:
            connect = channel.stream_stream(_CONNECT, response_deserializer=link_pb2.RouterMessage.FromString)
            call: Any = connect(metadata=((CLUSTER_TOKEN_METADATA, config.cluster_token),))
            self._send(hello=self._hello(), takes_bundles=True)
            for job in (self._write(call), self._read(call, group), self._heartbeat()):
                group.create_task(job)

    def _hello(self) -> common_pb2.WorkerHello:
        return common_pb2.WorkerHello(
            worker_id=self._name,
            role=self._role,
            incarnation=1 + self._role,
            address="127.0.0.1:1",
            model_fingerprint=self._config.model_fingerprint,
            block_size=_BLOCK_SIZE,
            num_blocks=_BLOCKS,
            max_model_len=self._config.max_model_len,
            max_num_seqs=self._config.streams,
            dtype="bfloat16",
            kv_bytes_per_token=1024,
        )

    def _send(self, **body: Any) -> None:
        self._outbound.put_nowait(link_pb2.WorkerMessage(**body).SerializeToString())

    async def _write(self, call: Any) -> None:
        while True:
            waiting = [await self._outbound.get()]
            while self._bundles and len(waiting) < MAX_BUNDLE_MESSAGES and not self._outbound.empty():
                waiting.append(self._outbound.get_nowait())
            bundle = link_pb2.WorkerMessage(bundle=waiting).SerializeToString()
            await call.write(waiting[0] if len(waiting) == 1 else bundle)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._send(heartbeat=common_pb2.WorkerLoad(blocks=common_pb2.BlockCounts(total=_BLOCKS, free=_BLOCKS)))

    async def _read(self, call: Any, group: asyncio.TaskGroup) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            for one in unbundled(message):
                self._obey(one, group)
        await call
        raise RuntimeError(f"the router ended the link of {self._name}")

    def _obey(self, message: link_pb2.RouterMessage, group: asyncio.TaskGroup) -> None:
        handlers = {"prefill": self._prefill, "bind": self._bind, "cancel": self._cancel}
        kind = message.WhichOneof("body")
        if kind == "welcome":
            self._bundles = message.takes_bundles
            self.welcomed.set()
        elif kind == "attach":
            self._attach(message.attach, group)
        elif kind in handlers:
            handlers[kind](getattr(message, kind))

    def _prefill(self, prefill: prefill_pb2.Prefill) -> None:
        lease_id = common_pb2.LeaseId(incarnation=1, counter=prefill.handle)
        started = prefill_pb2.PrefillStarted(handle=prefill.handle, lease_id=lease_id, ticket=bytes(400))
        self._send(prefill_started=started)
        self._send(step_batch=link_pb2.StepBatch(rows=[_row(prefill.handle, 0, prefill.spec.sampling.max_tokens)]))

    def _bind(self, bind: decode_pb2.Bind) -> None:
        self._binds[bind.handle] = bind
        self._send(reserved=decode_pb2.Reserved(handle=bind.handle))

    def _cancel(self, cancel: link_pb2.Cancel) -> None:
        self._binds.pop(cancel.handle, None)

    def _attach(self, attach: decode_pb2.Attach, group: asyncio.TaskGroup) -> None:
        """Report the KV as committed. The last Attach of a wave starts the decoding of the whole wave."""
        bind = self._binds.pop(attach.handle, None)
        if bind is None:
            return
        committed = decode_pb2.KvCommitted(
            handle=attach.handle, kv_bytes=1 << 20, transfer_s=0.001, commit_s=0.001, exposed_transfer_s=0.001
        )
        self._send(kv_committed=committed)
        self._wave.append(bind)
        if len(self._wave) == self._config.streams:
            wave, self._wave = self._wave, []
            group.create_task(self._decode(wave))

    async def _decode(self, wave: list[decode_pb2.Bind]) -> None:
        sampling = wave[0].spec.sampling
        steps = [_step(wave, index, sampling.max_tokens) for index in range(1, sampling.max_tokens)]
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for step in steps:
            if sampling.seed:
                due_s += sampling.seed / 1e6
                await asyncio.sleep(due_s - loop.time())
            self._outbound.put_nowait(step)


def _step(wave: list[decode_pb2.Bind], index: int, max_tokens: int) -> bytes:
    batch = link_pb2.StepBatch(rows=[_row(bind.handle, index, max_tokens) for bind in wave])
    return link_pb2.WorkerMessage(step_batch=batch).SerializeToString()


def _row(handle: int, index: int, max_tokens: int) -> link_pb2.StepRow:
    last = index + 1 == max_tokens
    finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return link_pb2.StepRow(handle=handle, index=index, ids=[index % 500], text=text_of(index).encode(), finish_reason=finish)


@contextlib.asynccontextmanager
async def serve(config: PeerConfig) -> AsyncIterator[dict[str, Any]]:
    """Run both workers, and yield once the router has welcomed them. Raises `TimeoutError` after 10 s."""
    workers = [_Worker(config, common_pb2.ROLE_PREFILL, "prefill-0"), _Worker(config, common_pb2.ROLE_DECODE, "decode-0")]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        async with asyncio.timeout(10.0):
            for worker in workers:
                await worker.welcomed.wait()
        yield {"event": "ready"}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
