"""An operator asks what happened to a request: the router tells its own part, and asks the workers for theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from pdserve.cli import main
from pdserve.observe.story import MAX_TEXT_CHARS
from pdserve.rpc.status import REASON_METADATA, REQUEST_ID_METADATA
from pdserve.rpc.v1 import common_pb2, link_pb2, story_pb2
from router.core.events import LinkId
from router.service import explaining
from router.workers.wire import MAX_FIELDS, WorkExplained, event_from_wire
from testkit.fake_worker import DECODE, PREFILL

from .local_cluster import LocalCluster, generate_request, local_cluster, read_answer

GOOD = ["queued", "placed", "reserved", "prefill_sent", "lease_granted", "attached", "first_token", "committed", "ended"]


async def ask(cluster: LocalCluster, name: str) -> story_pb2.ExplainRequestResponse:
    return await cluster.admin.ExplainRequest(story_pb2.ExplainRequestRequest(request_id=name))


def kinds(entries: Any) -> list[str]:
    return [entry.kind for entry in entries]


def fields(entry: story_pb2.StoryEntry) -> dict[str, str]:
    return {field.name: field.value for field in entry.fields}


async def serve(cluster: LocalCluster, **more: Any) -> str:
    """Return the router's id of a request that has ended, well or badly."""
    call = cluster.stub.Generate(generate_request([1, 2, 3], 3, **more))
    request_id = str(dict(await call.initial_metadata())[REQUEST_ID_METADATA])
    try:
        await read_answer(call)
    except grpc.aio.AioRpcError:
        pass
    return request_id


def test_a_good_request_is_told_with_the_parts_of_both_workers() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            request_id = await serve(cluster, request_id="mine")
            for name in (request_id, "mine"):
                told = await ask(cluster, name)
                assert (told.request_id, told.correlation_id, told.outcome) == (request_id, "mine", "finished")
                assert sorted(kinds(told.entries)) == sorted(GOOD)  # two links have no common order
                assert kinds(told.entries)[:4] == GOOD[:4]
                placed = fields(told.entries[1])
                assert (placed["placement"], placed["reason"], placed["decode_worker"]) == (
                    "disaggregated",
                    "default",
                    "decode-0",
                )
                assert placed["scores"].startswith("decode-0 ")
                assert {part.worker_id: kinds(part.entries) for part in told.workers} == {
                    "decode-0": ["bind", "attach"],
                    "prefill-0": ["prefill"],
                }
                assert all(0.0 <= entry.at_s <= 30.0 for entry in told.entries)

    asyncio.run(story())


def test_a_failed_request_says_why_and_which_worker_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "ANSWER_S", 0.1)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster(max_attempts=1) as cluster:
            cluster.decode.fail_next = common_pb2.ERROR_REASON_INTERNAL_BUG
            cluster.decode.explains = False
            told = await ask(cluster, await serve(cluster))
            assert told.outcome == "failed"
            assert kinds(told.entries) == ["queued", "placed", "lost", "ended"]
            assert fields(told.entries[2]) == {"role": "decode", "error": "internal_bug", "message": "told to fail"}
            (part,) = told.workers
            assert (part.worker_id, part.missing) == ("decode-0", "it did not answer within 0.1 s")
            assert not cluster.service._explainer._waiting

    asyncio.run(story())


def test_a_worker_that_left_is_named_and_a_running_request_is_told_too() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster((PREFILL, DECODE, DECODE)) as cluster:
            for worker in cluster.workers:
                worker.gate.clear()
            call = cluster.stub.Generate(generate_request([1, 2, 3], 3, placement=common_pb2.PLACEMENT_COLOCATED))
            request_id = str(dict(await call.initial_metadata())[REQUEST_ID_METADATA])
            decodes = [worker for worker in cluster.workers if worker.role == DECODE]
            await decodes[0].wait_for(lambda: any("bind" in worker.commands for worker in decodes))
            first, other = sorted(decodes, key=lambda worker: not worker.commands)
            await first.stop()
            await other.wait_for(lambda: "bind" in other.commands)
            told = await ask(cluster, request_id)
            assert told.outcome == ""
            assert "lost" in kinds(told.entries)
            assert kinds(told.entries).count("placed") == 2
            missing = {part.worker_id: part.missing for part in told.workers}
            assert missing == {first.worker_id: "it is not linked to this router now", other.worker_id: ""}
            for worker in cluster.workers:
                worker.gate.set()
            await read_answer(call)

    asyncio.run(story())


def test_what_a_lying_worker_tells_is_cut_and_no_worker_answers_for_another() -> None:
    """The parts of all workers go to the operator in one message, in the order of their times."""
    field = story_pb2.StoryField(name="n" * 1000, value="v" * 1000)
    told = [story_pb2.StoryEntry(at_s=at_s, kind="k" * 1000, fields=[field] * 20) for at_s in (math.nan, math.inf, -1.0)]
    wire = link_pb2.WorkerMessage(work_explained=story_pb2.WorkExplained(question=1, entries=told * 40))
    heard = event_from_wire(LinkId(7), wire)
    assert isinstance(heard, WorkExplained)
    assert heard.entries
    for entry in heard.entries:
        assert entry.at_s == -1.0
        assert {len(entry.kind), *(len(text) for pair in entry.fields for text in pair)} == {MAX_TEXT_CHARS}
        assert len(entry.fields) == MAX_FIELDS

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            explainer = cluster.service._explainer
            waits: asyncio.Future[WorkExplained] = asyncio.get_running_loop().create_future()
            explainer._waiting[1] = (LinkId(8), waits)
            explainer.answered(heard)
            assert not waits.done()
            explainer.answered(dataclasses.replace(heard, link=LinkId(8)))
            assert waits.done()

    asyncio.run(story())


def test_an_unknown_id_is_a_typed_error_that_says_what_is_kept() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            for name in ("nobody", ""):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(cluster, name)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
                assert dict(caught.value.trailing_metadata() or ())[REASON_METADATA] == "unknown_request"
                assert str(caught.value.details()).startswith(f"request_id: this router keeps no story of {name!r}")
                assert "the last 512 that failed" in str(caught.value.details())

    asyncio.run(story())


def test_too_many_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "MAX_QUESTIONS", 1)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(cluster, await serve(cluster))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(story())


def test_the_error_of_a_failed_request_names_the_command_that_explains_it() -> None:
    """A request that was refused at once has no story, and no hint."""

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster(max_attempts=1) as cluster:
            cluster.decode.fail_next = common_pb2.ERROR_REASON_INTERNAL_BUG
            asked = ("generate", "hi", "--max-tokens", "3", "--address", cluster.grpc_address)
            failed = await asyncio.to_thread(CliRunner().invoke, main, asked)
            assert failed.exit_code == 1
            hint = failed.stderr.partition("; `pdserve explain ")[2].partition("` tells its story\n")
            assert (await ask(cluster, hint[0])).outcome == "failed"
            refused = await asyncio.to_thread(CliRunner().invoke, main, (*asked, "--priority", "1", "--max-tokens", "9999"))
            assert refused.exit_code == 1
            assert "explain" not in refused.stderr

    asyncio.run(story())


def test_the_command_prints_one_timeline_of_router_and_workers() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            request_id = await serve(cluster)
            address = f"127.0.0.1:{cluster.admin_port}"
            shown = await asyncio.to_thread(CliRunner().invoke, main, ["explain", request_id, "--address", address])
            assert shown.exit_code == 0, shown.output
            lines = shown.stdout.splitlines()
            assert lines[0] == f"request {request_id}: finished"
            assert re.search(r"\+0\.0\d\d s  router", lines[1])  # what came before in the same turn may take a millisecond
            assert sum("  decode-0 " in line for line in lines) == 2
            unknown = await asyncio.to_thread(CliRunner().invoke, main, ["explain", "nobody", "--address", address])
            assert unknown.exit_code == 1
            assert unknown.stderr.startswith("error: request_id: this router keeps no story of 'nobody'")

    asyncio.run(story())
