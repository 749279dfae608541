"""A worker that fails all its requests is always the emptiest. It is ejected, with default settings, and no client notices."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.rpc.v1 import common_pb2
from testkit.fake_worker import DECODE, PREFILL

from ..local_cluster import local_cluster, right_ids


@pytest.mark.parametrize("reason", [common_pb2.ERROR_REASON_NUMERICAL_ERROR, common_pb2.ERROR_REASON_INTERNAL_BUG])
def test_one_broken_decode_worker_of_four_fails_no_request(reason: common_pb2.ErrorReason) -> None:
    async def play() -> None:
        async with local_cluster(
            (PREFILL, DECODE, DECODE, DECODE, DECODE), worker=lambda: {"token_interval_s": 0.005}
        ) as cluster:
            bad = cluster.workers[-1]
            bad.fail_attach = reason

            async def one(n: int) -> None:
                ids = [n, 3, 4, 5]
                answer = await cluster.generate(ids, 8)
                assert answer.ids == right_ids(ids, 8)

            def ejected() -> list[str]:
                return [w.hello.worker_id for w in cluster.service.snapshot().workers if w.ejected]

            calls = []
            while not ejected():  # chance decides how soon it gets five requests
                calls.append(asyncio.create_task(one(len(calls) % 200)))
                assert len(calls) < 4000
                await asyncio.sleep(0.005)
            await asyncio.gather(*calls)
            assert ejected() == [bad.worker_id]
            state = {w.hello.worker_id: w for w in cluster.service.snapshot().workers}
            assert state[bad.worker_id].not_ready_reason.startswith("ejected: ")
            assert bad.commands.count("attach") < 20
            await cluster.assert_idle()

    asyncio.run(play())
