"""A prefill and a decode worker without engines, fast enough to flood a router.

`testkit.fake_worker` computes each token when it is due. Here the requests of all streams form a wave: all its StepBatches are
made before the first is sent, so that tokens wait for the flooded router and not for its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from bench.router.peer_config import PeerConfig, text_of
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2
from testkit.fake_worker import DECODE, PREFILL, FakeWorker, _Sequence


@dataclass(slots=True)
class WaveWorker(FakeWorker):
    """A `FakeWorker` that decodes the requests of `max_num_seqs` streams together. Their seed is the time of a step in us."""

    _wave: list[_Sequence] = field(default_factory=list)

    def _attach(self, attach: decode_pb2.Attach) -> None:
        """Report the KV as committed. The last Attach of a wave starts the decoding of the whole wave."""
        sequence = self._sequences.get(attach.handle)
        if sequence is None:
            return
        sequence.next_index = 1
        self._commit(sequence)
        self._wave.append(sequence)
        if len(self._wave) == self.max_num_seqs:
            wave, self._wave = self._wave, []
            self._tasks.append(asyncio.create_task(self._decode(wave)))

    async def _decode(self, wave: list[_Sequence]) -> None:
        sampling = wave[0].sampling
        steps = [link_pb2.StepBatch(rows=[self._advance(one) for one in wave]) for _ in range(1, sampling.max_tokens)]
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for step in steps:
            if sampling.seed:
                due_s += sampling.seed / 1e6
                await asyncio.sleep(due_s - loop.time())
            self._send(step_batch=step)

    def _draw(self, sequence: _Sequence, index: int) -> tuple[int, str, common_pb2.FinishReason]:
        last = index + 1 == sequence.sampling.max_tokens
        finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
        return index % 500, text_of(index), finish


@contextlib.asynccontextmanager
async def serve(config: PeerConfig) -> AsyncIterator[dict[str, Any]]:
    """Run both workers, and yield once the router has welcomed them. Raises `TimeoutError`."""
    shape: dict[str, Any] = {
        "cluster_token": config.cluster_token,
        "model_fingerprint": config.model_fingerprint,
        "ticket": bytes(400),
        "num_blocks": 1 << 16,  # KV is not measured, so there is always room
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.streams,
    }
    async with WaveWorker(PREFILL, config.link, **shape), WaveWorker(DECODE, config.link, **shape):
        yield {"event": "ready"}
