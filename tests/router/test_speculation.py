"""What clients ask of speculative decoding reaches the workers, and what workers tell of it reaches everybody who looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx2
import openai
from rich.console import Console

from decode_worker.role import DecodeRole
from kvtransfer.api import KvRegion, Region
from pdserve.commands import tables
from pdserve.config import WorkerConfig
from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import BlockId, Incarnation, WorkerId
from pdserve.core.kv_layout import KvSpec
from pdserve.core.sampling import FinishReason
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.worker import LINK_VERSIONS, Role, WorkerHello, WorkerLoad
from pdserve.engine.schedule.collect import OutputToken
from pdserve.rpc.codec import drafts_to_fields, hello_to_wire, load_to_wire
from pdserve.rpc.v1 import common_pb2, inference_pb2, story_pb2
from pdserve.worker.host import Host
from pdserve.worker.link import RouterLink
from pdserve.worker.messages import Command, Reserve, ReserveResult, StepEvents
from router.http import serve_http
from sim.faults.oracle import CARD, MAX_MODEL_LEN, TOKENIZER
from sim.faults.worker import LAYOUT
from sim.world.server import FakeServer
from testkit.fake_worker import DECODE, PREFILL

from .local_cluster import TOKEN, LocalCluster, local_cluster, tiny_model

DRAFTS = DraftCounts(4, 12, 6, (3, 2, 1))
TOLD = {
    "num_drafts": 4,
    "num_draft_tokens": 12,
    "num_accepted_tokens": 6,
    "acceptance_rate": 0.5,
    "acceptance_length": 2.5,
    "num_accepted_tokens_per_pos": [3, 2, 1],
}
NEWEST = {"link_version": LINK_VERSIONS.newest}


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


@asynccontextmanager
async def drafting(**config: Any) -> AsyncIterator[tuple[LocalCluster, str]]:
    """A prefill worker that drafts nothing, and a decode worker that drafts, with both front ends."""
    async with local_cluster((PREFILL, DECODE), worker=lambda: NEWEST, **config) as cluster:
        cluster.decode.drafts = DRAFTS
        server = await serve_http(cluster.service, cluster.parser, "127.0.0.1", 0)
        try:
            yield cluster, f"http://127.0.0.1:{server.port}"
        finally:
            await server.close()


@dataclass(slots=True)
class PlayedWorker:
    """The role of a decode worker behind its own end of a link. The test plays the engine: of each request all tokens come in
    one step, and the last one tells of drafts."""

    cluster: LocalCluster
    drafted: DraftCounts = NO_COUNTS
    link: RouterLink = field(init=False)
    role: DecodeRole = field(init=False)

    def __post_init__(self) -> None:
        hello = WorkerHello(
            WorkerId("decode-0"), Role.DECODE, Incarnation(7), "127.0.0.1:1", tiny_model().card.fingerprint, LAYOUT.block_size,
            16, MAX_MODEL_LEN, 4, "bfloat16", 8, link_version=LINK_VERSIONS.newest, max_num_batched_tokens=64,
        )  # fmt: skip
        self.link = RouterLink(
            self.cluster.link_address,
            TOKEN,
            lambda: hello_to_wire(hello),
            lambda: load_to_wire(WorkerLoad(BlockCounts(16, 16, 0, 0, 0), speculation=self.drafted)),
            heartbeat_interval_s=0.05,
            router_lost_s=30.0,
            on_command=lambda command: self.role.on_command(command),
            on_lost=lambda: None,
        )
        host = Host(
            config=WorkerConfig("decode-0", self.cluster.link_address),
            card=CARD,
            kv_spec=KvSpec((LAYOUT,)),
            regions=(KvRegion.of(LAYOUT, Region(1 << 20, 16, LAYOUT.block_bytes)),),
            tokenizer=TOKENIZER,
            max_model_len=MAX_MODEL_LEN,
            incarnation=hello.incarnation,
            transport="nixl",
            transfer=cast(Any, None),
            agent_metadata=b"",
            address=hello.address,
            server=cast(Any, FakeServer()),
            submit=self._submit,
            send=self.link.send,
        )
        self.role = DecodeRole(host)

    def _submit(self, command: Command) -> None:
        if isinstance(command, Reserve):
            asyncio.get_running_loop().call_soon(self._serve, command)

    def _serve(self, command: Reserve) -> None:
        self.role.on_step(StepEvents(reserved=(ReserveResult(command.seq_id, ((BlockId(1),),)),)))
        last = command.spec.sampling.max_tokens - 1
        tokens = [OutputToken(command.seq_id, index, 3, None) for index in range(last)]
        tokens.append(OutputToken(command.seq_id, last, 3, FinishReason.LENGTH, speculation=DRAFTS))
        self.drafted = self.drafted.plus(DRAFTS)
        self.role.on_step(StepEvents(tokens=tuple(tokens)))


def test_what_an_engine_tells_reaches_clients_and_the_page_of_metrics() -> None:
    async def story() -> None:
        async with local_cluster((), placement="colocated") as cluster, asyncio.TaskGroup() as tasks:
            worker = PlayedWorker(cluster)
            linked = tasks.create_task(worker.link.run())
            await worker.link.connected.wait()
            answer = await cluster.generate((1, 2, 3), 5)
            assert answer.report.speculation == inference_pb2.Speculation(**TOLD)
            server = await serve_http(cluster.service, cluster.parser, "127.0.0.1", 0)
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
                body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
                told = (await client.post("/v1/completions", json=body)).json()
                assert told["pdserve"]["speculation"] == TOLD
                details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6}
                assert told["usage"]["completion_tokens_details"] == details
                await _until(lambda: _told(cluster, "decode-0") == DRAFTS.plus(DRAFTS))
                page = (await client.get("/metrics")).text
                labels = f'{{engine="decode",model_name="{cluster.service.model_name}"}}'
                assert f"vllm:spec_decode_num_accepted_tokens_total{labels} 12.0" in page.splitlines()
            await server.close()
            assert worker.role.idle
            linked.cancel()
            await worker.role.close()

    run(story())


def test_grpc_tells_each_choice_its_own_drafts() -> None:
    async def story() -> None:
        async with drafting() as (cluster, _):
            answer = await cluster.generate((1, 2, 3), 5)
            wanted = inference_pb2.Speculation(**TOLD)
            assert answer.report.speculation == wanted
            request = inference_pb2.GenerateRequest(n=3, tokens={"ids": (1, 2, 3)}, sampling={"max_tokens": 4})
            last = [one async for one in cluster.stub.Generate(request) if one.finish_reason]
            assert [one.report.speculation for one in last] == [wanted] * 3
            cluster.decode.drafts = None
            answer = await cluster.generate((1, 2, 3), 5)
            assert not answer.report.HasField("speculation"), "nothing was drafted"

    run(story())


def test_openai_usage_has_the_sum_and_the_report_has_those_of_each_choice() -> None:
    async def story() -> None:
        async with drafting() as (cluster, base), openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none") as client:
            name: Any = cluster.service.model_name
            messages: Any = [{"role": "user", "content": "hi"}]
            chat = await client.chat.completions.create(model=name, messages=messages, max_tokens=5, n=3)
            details = chat.usage.completion_tokens_details  # type: ignore[union-attr]
            assert details is not None
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (18, 18)
            assert details.reasoning_tokens == 0
            reports = chat.model_extra["pdserve"]["requests"]  # type: ignore[index]
            assert [one["speculation"] for one in reports] == [TOLD] * 3

            stream = await client.completions.create(
                model=name, prompt=[1, 2, 3], max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 5, "wrong drafts are no output"
            assert usage.completion_tokens_details.accepted_prediction_tokens == 6  # type: ignore[union-attr]
            assert usage.completion_tokens_details.rejected_prediction_tokens == 6  # type: ignore[union-attr]
            assert chunks[-1].model_extra["pdserve"]["speculation"] == TOLD  # type: ignore[index]

            response = await client.responses.create(model=name, input="hi", max_output_tokens=5)
            assert response.model_extra["pdserve"]["speculation"] == TOLD  # type: ignore[index]

            cluster.decode.drafts = None
            plain = await client.completions.create(model=name, prompt=[1, 2, 3], max_tokens=5)
            assert plain.usage.completion_tokens_details is None  # type: ignore[union-attr]
            assert "speculation" not in plain.model_extra["pdserve"]  # type: ignore[index]

    run(story())


def test_what_a_client_asks_for_reaches_both_workers_also_for_every_choice_and_in_a_replay() -> None:
    """A request without a limit has that of its class."""

    async def story() -> None:
        classes = {"slo_classes": {"mine": {"num_speculative_tokens": 7}}}
        async with drafting(**classes) as (cluster, base), httpx2.AsyncClient(base_url=base, timeout=60) as client:
            workers = (cluster.prefill, cluster.decode)

            def limits() -> list[list[int | None]]:
                found = [list(worker.draft_limits) for worker in workers]
                for worker in workers:
                    worker.draft_limits.clear()
                return found

            await cluster.generate((1, 2, 3), 5)
            assert limits() == [[None], [None]]
            for asked, got in (({"speculation": "off"}, 0), ({"num_speculative_tokens": 3}, 3), ({"slo_class": "mine"}, 7)):
                await cluster.generate((1, 2, 3), 5, **asked)
                assert limits() == [[got], [got]]
                body = {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2, **asked}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                assert limits() == [[got, got], [got, got]]
            wrong = await client.post("/v1/completions", json={"prompt": "x", "num_speculative_tokens": 65})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "num_speculative_tokens")

            cluster.decode.gate.clear()
            call = cluster.stub.Generate(inference_pb2.GenerateRequest(
                tokens={"ids": (1, 2, 3)}, sampling={"max_tokens": 5}, num_speculative_tokens=2
            ))  # fmt: skip
            await anext(aiter(call))
            spare = cluster.worker(DECODE, **NEWEST, incarnation=2)
            spare.drafts = DRAFTS
            async with spare:
                await cluster.decode.stop()
                last = [one async for one in call if one.finish_reason]
                assert spare.draft_limits == [2]
                assert last[0].report.speculation.num_drafts == DRAFTS.num_drafts, "the lost worker has told nothing"

    run(story())


def test_a_worker_of_an_older_release_obeys_every_limit_since_it_drafts_nothing() -> None:
    async def story() -> None:
        async with local_cluster((DECODE,), worker=lambda: {"link_version": 0}) as cluster:
            for fields in ({}, {"speculation": "auto"}, {"speculation": "off"}, {"num_speculative_tokens": 3}):
                assert len((await cluster.generate((1, 2), 3, **fields)).ids) == 3

    run(story())


def test_operators_see_drafts_in_metrics_in_the_state_and_in_stories() -> None:
    async def story() -> None:
        beats = {**NEWEST, "heartbeat_interval_s": 0.05}
        async with drafting() as (cluster, base), httpx2.AsyncClient(base_url=base, timeout=60) as client:
            fast = cluster.worker(DECODE, **beats, incarnation=3)
            fast.drafts = DRAFTS
            async with fast:
                await cluster.decode.stop()
                answers = [await cluster.generate((1, 2, 3), 5, request_id="mine") for _ in range(2)]
                assert all(answer.report.decode_worker == fast.worker_id for answer in answers)
                both = DRAFTS.plus(DRAFTS)
                await _until(lambda: _told(cluster, fast.worker_id) == both)
                page = (await client.get("/metrics", params={"workers": "1"})).text.splitlines()
                of_pool = f'engine="decode",model_name="{cluster.service.model_name}"'
                assert f"vllm:spec_decode_num_drafts_total{{{of_pool}}} 8.0" in page
                assert f"vllm:spec_decode_num_draft_tokens_total{{{of_pool}}} 24.0" in page
                assert f"vllm:spec_decode_num_accepted_tokens_total{{{of_pool}}} 12.0" in page
                places = [
                    f'num_accepted_tokens_per_pos_total{{{of_pool},position="{i}"}} {n}.0' for i, n in enumerate((6, 4, 2))
                ]
                assert all(f"vllm:spec_decode_{line}" in page for line in places)
                own = f'pdserve_worker_spec_decode_num_drafts_total{{role="decode",worker="{fast.worker_id}"}} 8.0'
                assert own in page
                assert not [line for line in page if "spec_decode" in line and "prefill" in line]
                state = await cluster.admin.GetClusterState(inference_pb2.GetClusterStateRequest())
                (worker,) = [one for one in state.workers if one.load.HasField("speculation")]
                assert worker.load.speculation == common_pb2.DraftCounts(**drafts_to_fields(both))
                console = Console(width=80)
                with console.capture() as captured:
                    console.print(tables.status(state, 80))
                line = f"{fast.worker_id}: 50.0% of its drafts were right, 2.50 tokens a step with drafts"
                assert line in captured.get().splitlines()
                told = await cluster.admin.ExplainRequest(story_pb2.ExplainRequestRequest(request_id="mine"))
                ended = {field.name: field.value for field in told.entries[-1].fields}
                assert (ended["draft_tokens"], ended["accepted_tokens"], ended["acceptance_length"]) == ("12", "6", "2.5")

    run(story())


def _told(cluster: LocalCluster, name: str) -> DraftCounts | None:
    loads = [one.load for one in cluster.service._core.registry if one.hello.worker_id == name]
    return loads[0].speculation if loads else None


async def _until(condition: Any) -> None:
    """Wait for a heartbeat to say so."""
    while not condition():  # noqa: ASYNC110 - nothing tells of a heartbeat
        await asyncio.sleep(0.005)
