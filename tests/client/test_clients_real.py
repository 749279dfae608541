"""The clients against real processes: answers, errors, cancels, lost servers, and a cluster of a program's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve import AsyncClient, Client, Retries, SamplingParams
from pdserve.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, Unavailable
from testkit.processes import BOUND_S, ProcessCluster
from tests.integration.real_service import tiny

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1900, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(tiny()) as running:
        yield running


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[Client]:
    with Client(cluster.grpc) as made:
        yield made


def eventually(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < ends, "it never holds"
        time.sleep(0.05)


def test_a_whole_answer_equals_its_stream_and_that_of_the_other_client(client: Client, cluster: ProcessCluster) -> None:
    asked = SamplingParams(max_tokens=8, seed=5, logprobs=2, ignore_eos=True)
    whole = client.generate("Once upon a time", asked, n=2, request_id="mine")
    assert [len(one.ids) for one in whole.outputs] == [8, 8]
    assert whole.report is not None
    assert whole.report.correlation_id == "mine"
    assert whole.outputs[0].prompt_tokens == len(client.tokenize("Once upon a time"))
    stream = client.stream("Once upon a time", asked)
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum((delta.logprobs for delta in deltas), ()) == whole.outputs[0].logprobs
    assert deltas[-1].report is not None
    assert stream.request_id

    async def other() -> tuple[str, str]:
        async with AsyncClient(cluster.grpc) as client:
            answer = await client.generate("Once upon a time", asked, n=2)
            return answer.text, "".join([delta.text async for delta in client.stream("Once upon a time", asked)])

    assert asyncio.run(other()) == (whole.text, whole.text)
    assert client.model_info().model == "tiny"


def test_errors_are_the_servers_own(client: Client, cluster: ProcessCluster) -> None:
    with pytest.raises(InvalidRequest, match="temperature") as caught:
        client.generate("a", SamplingParams(temperature=9.0))
    assert caught.value.field == "temperature"
    with pytest.raises(DeadlineExceeded):
        client.generate([5] * 900, SamplingParams(max_tokens=1000, ignore_eos=True), deadline_s=0.05)
    with pytest.raises(Unavailable, match="pdserve up"), Client("127.0.0.1:9", retries=Retries(1)) as lost:
        lost.generate("a", GREEDY)
    closed = Client(cluster.grpc)
    closed.close()
    closed.close()
    with pytest.raises(Unavailable, match="closed"):
        closed.generate("a", GREEDY)
    cluster.assert_empty()


def test_a_cancelled_answer_frees_its_blocks(client: Client, cluster: ProcessCluster) -> None:
    """By another thread, by leaving the loop, and by cancelling an asyncio task."""
    stream = client.stream("a", LONG)

    def read() -> None:
        for _ in stream:
            threading.Thread(target=stream.cancel).start()

    with pytest.raises(Cancelled):
        read()
    for _ in client.stream("a", LONG):
        break

    async def leave() -> None:
        async with AsyncClient(cluster.grpc) as client:
            task = asyncio.create_task(client.generate("a", LONG))
            async for _ in client.stream("a", GREEDY):
                break
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(leave())
    cluster.assert_empty()


def test_many_streams_share_one_connection(cluster: ProcessCluster) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with AsyncClient(cluster.grpc, retries=Retries(20)) as client:
            answers = await asyncio.gather(*[client.generate([i % 7 + 5, 9], GREEDY) for i in range(100)])
            return [answer.ids for answer in answers]

    found = asyncio.run(run())
    assert all(ids == found[i % 7] for i, ids in enumerate(found))
    cluster.assert_empty()


def test_a_router_that_dies_is_an_error_and_one_that_comes_back_serves(client: Client, cluster: ProcessCluster) -> None:
    expected = client.generate([5, 6, 7], GREEDY).ids

    def lose_it() -> None:
        for _ in client.stream("a", LONG):  # a part of the text is out, so it is not tried again
            cluster.processes["router"].kill()

    with pytest.raises(Unavailable):
        lose_it()
    threading.Timer(1.0, cluster.heal).start()
    with Client(cluster.grpc, retries=Retries(60, longest_wait_s=1.0)) as patient:
        assert patient.generate([5, 6, 7], GREEDY).ids == expected
    cluster.heal()
    cluster.assert_empty()


SCRIPT = """
    import os, signal, sys
    from pdserve import LLM, SamplingParams
    from pdserve.core.errors import InvalidRequest
    llm = LLM("tiny", max_model_len=512, dtype="float32")
    print("address", llm.address, flush=True)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    answers = llm.generate(["The sky is", [5, 6, 7], "The sky is"], params, use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in answers] == [6, 6, 6]
    assert answers[0].text == answers[2].text
    try:
        llm.generate("a", SamplingParams(temperature=9.0))
    except InvalidRequest as exc:
        assert exc.field == "temperature"
    print("done", flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_example_of_a_batch_runs() -> None:
    program = [sys.executable, str(ROOT / "examples" / "offline_batch.py"), "--model", "tiny", "--max-tokens", "4"]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=4 * BOUND_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) >= 4


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_program_s_own_cluster_ends_with_it(how: str) -> None:
    before = {process.pid for process in psutil.process_iter()}
    program = [sys.executable, "-c", textwrap.dedent(SCRIPT), how]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=4 * BOUND_S, check=False)
    assert "done" in ran.stdout, ran.stderr
    assert ran.returncode == (0 if how == "ended" else -signal.SIGKILL), ran.stderr
    address = ran.stdout.split()[1]

    def gone() -> bool:
        left = [
            p
            for p in psutil.process_iter(["cmdline"])
            if p.pid not in before and "pdserve" in " ".join(p.info["cmdline"] or ())
        ]
        return not left or all(p.pid == os.getpid() for p in left)

    eventually(gone)
    with pytest.raises(Unavailable), Client(address, retries=Retries(1)) as client:
        client.model_info()
