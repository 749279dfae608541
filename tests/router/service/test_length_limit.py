"""How long a request may be, when pools turn out smaller than the settings tell, and differ."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import grpc
import pytest

from pdserve.config import EngineConfig
from pdserve.core.worker import Role
from pdserve.rpc.v1 import inference_pb2
from router.core.events import LinkId
from router.core.registry import Registry
from router.service.model import LengthLimit, ServedModel
from testkit.fake_worker import DECODE, PREFILL
from testkit.random_models import write_random

from ..core_peers import FINGERPRINT, hello
from ..local_cluster import LocalCluster, generate_request, local_cluster, read_answer, right_ids, tiny_model


def test_the_longest_request_fits_the_largest_worker_of_the_smaller_pool() -> None:
    registry = Registry(FINGERPRINT)
    limit = LengthLimit(tiny_model(), registry)
    assert limit.max_model_len == 256, "what settings say, while nobody is known"
    lengths = {Role.DECODE: (30, 200), Role.PREFILL: (100, 64)}
    links = [LinkId(n) for n in range(4)]
    for link, (role, length) in zip(links, [(role, n) for role, both in lengths.items() for n in both], strict=True):
        registry.join(link, hello(f"{role.value}-{link}", role, max_model_len=length), now_s=0.0)
    assert limit.max_model_len == 100
    registry.leave(links[2])
    assert limit.max_model_len == 64
    registry.leave(links[3])
    assert limit.max_model_len == 64, "they may come back"
    registry.leave(links[1])
    assert limit.max_model_len == 30
    registry.join(LinkId(9), hello("decode-9", Role.DECODE, max_model_len=4096), now_s=0.0)
    registry.join(LinkId(8), hello("prefill-8", Role.PREFILL, max_model_len=4096), now_s=0.0)
    assert limit.max_model_len == 256, "never over the setting"


def test_a_pool_that_only_its_workers_know_is_limited_by_the_model_until_they_join() -> None:
    card = tiny_model().card
    assert ServedModel.load(EngineConfig(model="tiny", device="cuda")).max_model_len == card.max_position
    assert ServedModel.load(EngineConfig(model="tiny", device="cuda", max_model_len=99)).max_model_len == 99
    block = card.kv_layout(16, "auto").block_bytes
    known = EngineConfig(model="tiny", device="cuda", kv_cache_memory=3 * block)
    assert ServedModel.load(known).max_model_len == 48
    assert ServedModel.load(dataclasses.replace(known, device="cpu", kv_cache_memory=2 * block)).max_model_len == 32


def test_a_pool_of_a_model_with_windows_is_limited_by_the_model_until_its_workers_join(tmp_path: Path) -> None:
    """The router does not know how large the pools of its groups are, so it must refuse nothing that a worker would take."""
    write_random(tmp_path, "mistral")
    small = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", kv_cache_memory=1 << 17)
    assert ServedModel.load(small).max_model_len == 2048
    assert ServedModel.load(dataclasses.replace(small, max_model_len=99)).max_model_len == 99


@pytest.mark.parametrize(("prefill", "decode"), [(100, 200), (200, 100)])
def test_a_prompt_that_can_never_fit_is_refused_with_the_limit_that_the_pools_have(prefill: int, decode: int) -> None:
    async def main() -> None:
        async with (
            local_cluster(()) as cluster,
            cluster.worker(PREFILL, max_model_len=prefill),
            cluster.worker(DECODE, max_model_len=decode),
        ):
            await check(cluster)

    async def check(cluster: LocalCluster) -> None:
        info = await cluster.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert info.max_model_len == 100
        for prompt, max_tokens, named in (([1] * 100, 1, "99"), ([1] * 60, 41, "40")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.generate(prompt, max_tokens)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = str(refused.value.details())
            assert all(word in details for word in ("max_model_len", "100", named))
        answer = await cluster.generate([1] * 60, 40)
        assert answer.ids == right_ids([1] * 60, 40)
        open_ended = generate_request([1] * 60, 1)
        open_ended.sampling.ClearField("max_tokens")
        open_ended.sampling.ignore_eos = True
        assert len((await read_answer(cluster.stub.Generate(open_ended))).ids) == 40, "as many as can follow"
        await cluster.assert_idle()

    asyncio.run(main())
