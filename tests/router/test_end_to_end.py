"""Clients, router and scripted workers over real sockets: the good paths, and every way a request ends early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.core.errors import UnknownWorker
from pdserve.rpc.status import REASON_METADATA, RETRY_AFTER_METADATA
from pdserve.rpc.v1 import common_pb2, inference_pb2
from router.api.request import GenerateInput
from testkit.fake_worker import DECODE, PREFILL, FakeWorker, logprobs_at

from .local_cluster import LocalCluster, cancel_request, generate_request, local_cluster, read_answer, right_ids, right_text

TIMEOUT_S = 60.0


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


async def failure(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, machine-readable reason and message of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), str(metadata.get(REASON_METADATA, "")), caught.value.details() or ""


async def started(cluster: LocalCluster, ids: tuple[int, ...] = (1, 2, 3), max_tokens: int = 100, **fields: Any) -> Any:
    """A call of which the first token has arrived; the rest waits behind the decode worker's gate."""
    for worker in cluster.workers:
        if worker.role == DECODE:
            worker.gate.clear()
    call = cluster.stub.Generate(generate_request(ids, max_tokens, **fields))
    first = await anext(aiter(call))
    assert first.index == 0
    return call


async def rest(call: Any) -> list[int]:
    """The ids that are still to come."""
    return [i async for message in call for i in message.ids]


def test_logprobs_of_every_token_arrive_by_whichever_link_it_comes() -> None:
    """Token 0 is drawn by prefill, the others by decode; a request that asks for none is sent none."""

    async def story() -> None:
        async with local_cluster() as cluster:
            for asked in (None, 0, 3):
                message = generate_request((1, 2, 3), 6)
                if asked is not None:
                    message.sampling.logprobs = asked
                count = 0
                async for part in cluster.stub.Generate(message):
                    assert part.HasField("logprobs") == (asked is not None)
                    if asked is not None:
                        expected = [logprobs_at(part.index + i, message.sampling) for i in range(len(part.ids))]
                        assert list(part.logprobs.chosen) == [one.chosen[0] for one in expected if one]
                        assert list(part.logprobs.top_ids) == [i for one in expected if one for i in one.top_ids]
                        assert list(part.logprobs.top) == [x for one in expected if one for x in one.top]
                    count += len(part.ids)
                assert count == 6

    run(story())


def test_a_worker_that_tells_no_logprobs_where_they_are_asked_for_fails_the_request_alone(monkeypatch) -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            monkeypatch.setattr("testkit.fake_worker.logprobs_at", lambda *_: None)
            message = generate_request((1, 2, 3), 4)
            message.sampling.logprobs = 1
            code, reason, details = await failure(read_answer(cluster.stub.Generate(message)))
            assert (code, reason) == (grpc.StatusCode.INTERNAL, "internal_bug")
            assert "log-probabilities" in details
            answer = await read_answer(cluster.stub.Generate(generate_request((1, 2, 3), 4)))
            assert len(answer.ids) == 4

    run(story())


def test_disaggregated_tokens_come_in_order_with_a_full_report() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            call = cluster.stub.Generate(generate_request((1, 2, 3), 20))
            answer = await read_answer(call)
            assert answer.ids == right_ids((1, 2, 3), 20)
            assert answer.text == right_text((1, 2, 3), 20)
            assert answer.last is not None
            assert answer.last.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert (answer.last.usage.prompt_tokens, answer.last.usage.output_tokens) == (3, 20)
            report = answer.report
            assert report.placement == common_pb2.PLACEMENT_DISAGGREGATED
            assert (report.placement_reason, report.prefill_worker, report.decode_worker) == (
                "default",
                "prefill-0",
                "decode-0",
            )
            assert report.kv_bytes > 0
            assert 0 < report.ttft_s <= report.total_s
            assert (report.attempts, report.binds) == (1, 1)
            timeline = json.loads(dict(await call.trailing_metadata())["pdserve-timeline"])
            assert timeline["output_tokens"] == 20
            await cluster.assert_idle()

    run(story())


def test_64_at_once_each_get_their_own_tokens() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE, DECODE)) as cluster:
            prompts = [(*range(n % 40 + 1), n) for n in range(64)]
            answers = await asyncio.gather(*(cluster.generate(p, 10 + i % 7) for i, p in enumerate(prompts)))
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                assert answer.ids == right_ids(prompt, 10 + i % 7)
            assert {a.report.decode_worker for a in answers} == {"decode-0", "decode-1"}
            await cluster.assert_idle()

    run(story())


def test_colocated_when_asked_and_when_there_is_no_prefill_pool() -> None:
    async def story() -> None:
        async with local_cluster((DECODE,)) as cluster:
            answer = await cluster.generate((1, 2), 5)
            assert answer.ids == right_ids((1, 2), 5)
            assert answer.report.placement_reason == "prefill_pool_empty"
            assert answer.report.prefill_worker == ""
            asked = await cluster.generate((1, 2), 5, placement=common_pb2.PLACEMENT_COLOCATED)
            assert asked.report.placement_reason == "requested"
            forced = cluster.generate((1, 2), 5, placement=common_pb2.PLACEMENT_DISAGGREGATED)
            assert (await failure(forced))[:2] == (grpc.StatusCode.UNAVAILABLE, "unavailable")
            await cluster.assert_idle()

    run(story())


def test_token_0_that_ends_the_request_moves_no_kv() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            answer = await cluster.generate((1, 2, 3), 1)
            assert answer.ids == right_ids((1, 2, 3), 1)
            assert answer.report.kv_bytes == 0
            await cluster.assert_idle()
            assert cluster.decode.commands[0] == "bind"
            assert cluster.decode.commands[-1] == "cancel"

    run(story())


def test_no_worker_at_all_is_unavailable_at_once() -> None:
    async def story() -> None:
        async with local_cluster(()) as cluster:
            code, reason, message = await failure(cluster.generate((1,), 1))
            assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
            assert "decode worker" in message

    run(story())


@pytest.mark.parametrize("roles", [(PREFILL, DECODE), (DECODE,)])
@pytest.mark.parametrize("how", ["disconnect", "cancel by id"])
def test_a_client_that_leaves_frees_both_workers(roles: tuple[Any, ...], how: str) -> None:
    async def story() -> None:
        async with local_cluster(roles) as cluster:
            for worker in cluster.workers:
                worker.token_interval_s = 0.02
            call = cluster.stub.Generate(generate_request((1, 2, 3), 200))
            assert (await anext(aiter(call))).index == 0
            if how == "disconnect":
                call.cancel()
            else:
                assert (await cluster.stub.Cancel(await cancel_request(call))).found
                assert (await failure(rest(call)))[:2] == (grpc.StatusCode.CANCELLED, "cancelled")
            await cluster.assert_idle()
            assert cluster.decode.cancelled
            assert not (await cluster.stub.Cancel(await cancel_request(call))).found

    run(story())


@pytest.mark.parametrize("whose", ["deadline_s", "the call's own"])
def test_a_deadline_ends_the_request_everywhere(whose: str) -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            cluster.decode.gate.clear()
            request = generate_request((1, 2), 50)
            if whose == "deadline_s":
                request.deadline_s = 0.3
                call = cluster.stub.Generate(request)
            else:
                call = cluster.stub.Generate(request, timeout=0.3)
            code, _, message = await failure(read_answer(call))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert whose != "deadline_s" or "deadline_s" in message
            await cluster.assert_idle()

    run(story())


def test_a_full_queue_is_overloaded_with_a_hint_and_the_others_are_served() -> None:
    async def story() -> None:
        async with local_cluster(max_queued_requests=2, worker=lambda: {"max_num_seqs": 1}) as cluster:
            first = await started(cluster)
            waiting = [asyncio.create_task(cluster.generate((i,), 2)) for i in range(2)]
            await cluster.decode.wait_for(lambda: cluster.service.snapshot().queued_requests == 2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.generate((9,), 2)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert float(dict(caught.value.trailing_metadata())[RETRY_AFTER_METADATA]) > 0
            cluster.decode.gate.set()
            await rest(first)
            assert [a.ids for a in await asyncio.gather(*waiting)] == [right_ids((i,), 2) for i in range(2)]
            await cluster.assert_idle()

    run(story())


def test_no_room_is_tried_on_the_other_decode_worker() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE, DECODE)) as cluster:
            for worker in cluster.workers:
                worker.refuse_binds = 1 if worker.worker_id == "decode-0" else 0
            answers = [await cluster.generate((1, n), 3) for n in range(4)]
            assert [a.ids for a in answers] == [right_ids((1, n), 3) for n in range(4)]
            assert sum(a.report.binds for a in answers) == 5
            await cluster.assert_idle()

    run(story())


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_a_lost_workers_requests_go_on_elsewhere_where_they_stopped(role: Any) -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, PREFILL, DECODE, DECODE)) as cluster:
            call = await started(cluster)
            (decode,) = [w for w in cluster.workers if w.role == DECODE and w.live_handles]
            lost = next(w for w in cluster.workers if w.role == PREFILL) if role == PREFILL else decode
            await lost.stop()
            for worker in cluster.workers:
                worker.gate.set()
            assert [*right_ids((1, 2, 3), 1), *await rest(call)] == right_ids((1, 2, 3), 100)
            await cluster.assert_idle()

    run(story())


def test_a_lost_worker_fails_its_requests_when_nobody_comes_back_in_time() -> None:
    async def story() -> None:
        async with local_cluster(recovery_wait_s=0.2) as cluster:
            call = await started(cluster)
            await cluster.decode.stop()
            code, reason, message = await failure(rest(call))
            assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
            assert "no decode worker is ready" in message
            await cluster.assert_idle()

    run(story())


def test_a_silent_worker_is_lost_and_a_heartbeat_is_answered() -> None:
    async def story() -> None:
        settings = {"heartbeat_interval_s": 0.1}
        async with local_cluster(
            heartbeat_interval_s=0.1, heartbeat_lost_s=2.5, recovery_wait_s=0.2, worker=lambda: settings
        ) as cluster:
            call = await started(cluster)
            await cluster.decode.wait_for(lambda: cluster.decode.alive_seen > 0)
            cluster.decode.silent = True
            assert (await failure(rest(call)))[1] == "unavailable"
            await cluster.decode.wait_for(lambda: cluster.decode.refused is not None)
            await cluster.assert_idle()

    run(story())


@pytest.mark.parametrize("reason", ["LEASE_GONE", "TRANSFER_FAILED", "KV_CORRUPT", "KV_ROTTED", "REPLICA_LOST", "OVERLOADED"])
def test_a_request_that_a_worker_gives_up_is_tried_again(reason: str) -> None:
    async def story() -> None:
        async with local_cluster(worker=lambda: {"heartbeat_interval_s": 0.05}) as cluster:
            cluster.prefill.fail_next = common_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
            answer = await cluster.generate((1, 2), 4)
            assert answer.ids == right_ids((1, 2), 4)
            assert (answer.report.attempts, answer.report.binds) == (2, 2)
            await cluster.assert_idle()

    run(story())


def test_a_workers_bug_fails_its_request_alone_with_its_reason() -> None:
    async def story() -> None:
        async with local_cluster(max_attempts=1) as cluster:
            cluster.prefill.fail_next = common_pb2.ERROR_REASON_INTERNAL_BUG
            assert (await failure(cluster.generate((1, 2), 4)))[1] == "internal_bug"
            assert (await cluster.generate((1, 2), 4)).ids == right_ids((1, 2), 4)
            await cluster.assert_idle()

    run(story())


def test_drain_gives_a_worker_nothing_new_and_lets_it_finish() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE, DECODE)) as cluster:
            call = await started(cluster)
            (busy,) = [w for w in cluster.workers if w.role == DECODE and w.live_handles]
            with pytest.raises(UnknownWorker):
                cluster.service.drain("decode-7")
            cluster.service.drain(busy.worker_id)
            await busy.wait_for(lambda: busy.draining)
            for worker in cluster.workers:
                worker.gate.set()
            answers = [await cluster.generate((1, n), 3) for n in range(4)]
            assert busy.worker_id not in {a.report.decode_worker for a in answers}
            assert [*right_ids((1, 2, 3), 1), *await rest(call)] == right_ids((1, 2, 3), 100)
            state = {w.hello.worker_id: w for w in cluster.service.snapshot().workers}[busy.worker_id]
            assert (state.draining, state.ready, state.not_ready_reason) == (True, False, "draining")
            assert state.requests_placed == 0
            await cluster.assert_idle()

    run(story())


def test_a_worker_is_ready_when_kv_has_passed_and_nobody_sees_the_probe() -> None:
    async def story() -> None:
        async with local_cluster(probe_workers=True) as cluster:
            await cluster.decode.wait_for(lambda: all(w.ready for w in cluster.service.snapshot().workers))
            assert {"prefill", "attach"} <= {*cluster.prefill.commands, *cluster.decode.commands}
            assert (await cluster.generate((1, 2), 4)).ids == right_ids((1, 2), 4)
            text = cluster.service.metrics().decode()
            assert "pdserve_generation_tokens_total 4.0" in text
            assert "pdserve_time_to_first_token_seconds_count 1.0" in text
            await cluster.assert_idle()

    run(story())


def test_a_client_that_takes_nothing_is_cancelled() -> None:
    async def story() -> None:
        async with local_cluster(stalled_client_s=2.5) as cluster:
            generation = await cluster.service.submit(GenerateInput(prompt=(1, 2), sampling={"max_tokens": 100}))
            await cluster.decode.wait_for(lambda: "attach" in cluster.decode.commands)
            await cluster.decode.wait_for(lambda: not cluster.service._open)
            with pytest.raises(Exception, match="took nothing"):
                await anext(generation)
            await cluster.assert_idle()

    run(story())


def test_a_grpc_client_that_stops_reading_is_cancelled_on_both_workers() -> None:
    """Its task waits inside a write: flow control has closed the window, so only a cancel gets it out."""

    async def story() -> None:
        settings = {"text_of": lambda _: "x" * 100_000}
        async with local_cluster(stalled_client_s=2.5, worker=lambda: settings) as cluster:
            cluster.decode.token_interval_s = 0.001
            call = cluster.stub.Generate(generate_request((1, 2), 250))
            await anext(aiter(call))
            await cluster.decode.wait_for(lambda: "attach" in cluster.decode.commands and not cluster.service._open)
            await cluster.assert_idle()
            assert (await failure(rest(call)))[:2] == (grpc.StatusCode.CANCELLED, "cancelled")

    run(story())


def test_links_need_the_token_and_the_same_model_and_layout() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            wrong = [
                ({"cluster_token": "guess"}, grpc.StatusCode.UNAUTHENTICATED),
                ({"model_fingerprint": "other"}, grpc.StatusCode.FAILED_PRECONDITION),
                ({"block_size": 32}, grpc.StatusCode.FAILED_PRECONDITION),
                ({"kv_bytes_per_token": 7}, grpc.StatusCode.FAILED_PRECONDITION),
            ]
            for changes, code in wrong:
                worker = cluster.worker(DECODE, worker_id="stranger", **changes)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await worker.start()
                assert caught.value.code() is code
                cluster.workers.remove(worker)
            assert (await cluster.generate((1,), 2)).ids == right_ids((1,), 2)

    run(story())


def test_workers_that_store_kv_in_another_dtype_may_join() -> None:
    """Of another number of bytes a token, as that dtype has."""

    async def story() -> None:
        async with local_cluster() as cluster:
            other = cluster.worker(DECODE, worker_id="narrow", dtype="int8", kv_bytes_per_token=9)
            async with other:
                assert (await cluster.generate((1,), 2)).ids == right_ids((1,), 2)

    run(story())


def test_a_worker_that_dials_again_replaces_its_old_link_and_goes_on_with_its_requests() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            old = cluster.decode
            call = await started(cluster)
            cluster.workers.remove(old)
            again = cluster.worker(DECODE, worker_id=old.worker_id, incarnation=old.incarnation)
            async with again:
                assert [*right_ids((1, 2, 3), 1), *await rest(call)] == right_ids((1, 2, 3), 100)
                await old.wait_for(lambda: not old.connected)
                assert (await cluster.generate((1,), 3)).ids == right_ids((1,), 3)

    run(story())


def test_health_and_reflection_follow_the_pools() -> None:
    async def story() -> None:
        async with local_cluster(()) as cluster:
            health = health_pb2_grpc.HealthStub(cluster.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="pdserve.rpc.v1.Inference"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with cluster.worker(DECODE):
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(cluster.channel).ServerReflectionInfo(iter([asked]))
            names = [service.name for service in (await call.read()).list_services_response.service]
            assert "pdserve.rpc.v1.Inference" in names

    run(story())


def test_state_info_tokenize_and_metrics() -> None:
    async def story() -> None:
        async with local_cluster(worker=lambda: {"heartbeat_interval_s": 0.05}) as cluster:
            await cluster.generate((1, 2, 3), 4)
            info = await cluster.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            assert (info.model, info.vocab_size, info.max_model_len) == ("tiny", 512, 256)
            assert (info.dtype, info.kv_cache_dtype) == ("bfloat16", "bfloat16")
            ids = (await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text="hello there"))).ids
            assert list(ids) == cluster.service.model.tokenizer.encode("hello there")
            state = await cluster.admin.GetClusterState(inference_pb2.GetClusterStateRequest())
            assert state.block_size == cluster.service.model.kv_spec.block_size
            assert [(w.hello.worker_id, w.ready, w.hello.pid, w.load.blocks.total) for w in state.workers] == [
                ("prefill-0", True, 1, 1024),
                ("decode-0", True, 1, 1024),
            ]
            assert {worker.hello.niceness for worker in state.workers} == {15}
            text = cluster.service.metrics().decode()
            for line in (
                'pdserve_requests_total{outcome="length"} 1.0',
                'pdserve_placements_total{placement="disaggregated",reason="default"} 1.0',
                "pdserve_generation_tokens_total 4.0",
                "pdserve_time_to_first_token_seconds_count 1.0",
                'pdserve_worker_blocks{role="decode",state="unaccounted",worker="decode-0"} 0.0',
                "pdserve_num_requests_running 0.0",
            ):
                assert line in text

    run(story())


def test_text_and_chat_prompts_reach_the_workers_as_ids() -> None:
    async def story() -> None:
        async with local_cluster() as cluster:
            tokenizer = cluster.service.model.tokenizer
            request = inference_pb2.GenerateRequest(text="once upon a time")
            request.sampling.max_tokens = 4
            answer = await read_answer(cluster.stub.Generate(request))
            assert answer.ids == right_ids(tokenizer.encode("once upon a time"), 4)
            chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
            request = inference_pb2.GenerateRequest(chat=chat)
            request.sampling.max_tokens = 4
            answer = await read_answer(cluster.stub.Generate(request))
            assert tokenizer.chat_template is not None
            rendered = tokenizer.chat_template.render([("user", "hi")])
            assert answer.ids == right_ids(tokenizer.encode(rendered, add_special_tokens=False), 4)

    run(story())


def test_the_router_closes_with_requests_running() -> None:
    async def story() -> None:
        workers: list[FakeWorker] = []
        async with local_cluster() as cluster:
            workers = cluster.workers
            await started(cluster)
        assert all(not w.live_handles for w in workers)
        assert len(asyncio.all_tasks()) == 1

    run(story())
