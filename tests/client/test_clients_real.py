"""The clients against real processes: answers, errors, cancels, lost servers, and a cluster of a program's own."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pdserve import LLM, AsyncClient, Client, RequestOutput, Retries, SamplingParams
from pdserve.client.llm import _Batch
from pdserve.client.loop_thread import LoopThread
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
            said = await client.chat([{"role": "user", "content": "hello"}], asked)
            assert (
                "".join([delta.text async for delta in client.stream_chat([{"role": "user", "content": "hello"}], asked)])
                == said.text
            )
            return answer.text, "".join([delta.text async for delta in client.stream("Once upon a time", asked)])

    assert asyncio.run(other()) == (whole.text, whole.text)
    chat = [{"role": "user", "content": "hello"}]
    assert "".join(delta.text for delta in client.stream_chat(chat, asked)) == client.chat(chat, asked).text
    assert client.model_info().model == "tiny"
    ids = client.tokenize("Once upon a time")
    assert client.detokenize(ids) == "Once upon a time"
    with pytest.raises(InvalidRequest) as caught:
        client.detokenize([-1])
    assert caught.value.field == "ids"


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
    with pytest.raises(Unavailable, match="closed"):
        list(closed.stream("a", GREEDY))
    cluster.assert_empty()


def test_a_client_that_is_closed_ends_its_streams_with_an_error(cluster: ProcessCluster) -> None:
    """The task of a stream goes on after the error: nobody has cancelled the task."""
    client = Client(cluster.grpc)

    def read() -> None:
        for _ in client.stream("a", LONG):
            client.close()

    with pytest.raises(Unavailable, match="closed"):
        read()

    async def close_it() -> None:
        client = AsyncClient(cluster.grpc)
        async for _ in client.stream("a", LONG):
            await client.close()

    with pytest.raises(Unavailable, match="closed"):
        asyncio.run(close_it())
    cluster.assert_empty()


def test_a_request_is_cancelled_from_another_connection(client: Client, cluster: ProcessCluster) -> None:
    stream, found = client.stream("a", LONG), []

    def read() -> None:
        for _ in stream:
            if not found:
                with Client(cluster.grpc) as other:
                    assert not other.cancel(stream.request_id, "a token of nobody")
                    found.append(other.cancel(stream.request_id, stream.cancel_token))

    with pytest.raises(Cancelled):
        read()
    assert found == [True]
    assert not client.cancel(stream.request_id, stream.cancel_token), "it has ended"

    async def other() -> tuple[str, bool]:
        async with AsyncClient(cluster.grpc) as client:
            text = await client.detokenize(await client.tokenize("hello"), skip_special_tokens=True)
            return text, await client.cancel(stream.request_id, stream.cancel_token)

    assert asyncio.run(other()) == ("hello", False)
    cluster.assert_empty()


def test_a_storm_of_cancels_leaves_nothing(client: Client, cluster: ProcessCluster) -> None:
    """Cancels come before the request, before its first token and after it; and threads end in the middle of a stream."""
    found: list[str] = []

    def read(place: int) -> None:
        stream = client.stream([5, 6, place], LONG)
        threading.Timer(place * 0.01, stream.cancel).start()
        try:
            for _ in stream:
                if place % 10 == 9:
                    found.append("left")
                    return
        except Cancelled:
            found.append("cancelled")

    threads = [threading.Thread(target=read, args=(place,)) for place in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(found) == len(threads)
    assert "cancelled" in found
    cluster.assert_empty()


QUICK_START = """
from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="facebook/opt-125m")
    outputs = llm.generate(prompts, sampling_params)
    print("\\nGenerated Outputs:\\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
"""
"""The program of vLLM's quick start for offline batches, without its comments."""


@pytest.fixture
def shared(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every `LLM` gets the cluster of these tests instead of one of its own, whatever its model. One that its program does not
    close is closed here, as at the end of a program."""
    closes: list[Callable[[], None]] = []
    monkeypatch.setattr("pdserve.client.llm.atexit", types.SimpleNamespace(register=closes.append, unregister=closes.remove))
    own = contextlib.nullcontext(types.SimpleNamespace(address=cluster.grpc, check=lambda: None))
    monkeypatch.setattr("pdserve.client.llm.OwnCluster", lambda *_, **__: own)
    yield
    for close in [*closes]:
        close()


@pytest.mark.usefixtures("shared")
def test_the_quick_start_of_vllm_runs_with_one_import_changed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(QUICK_START.replace("from vllm import", "from pdserve import"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    prompts = [ast.literal_eval(line.partition("Prompt:")[2].strip()) for line in lines if line.startswith("Prompt:")]
    outputs = [ast.literal_eval(line.partition("Output:")[2].strip()) for line in lines if line.startswith("Output:")]
    assert prompts == re.findall('    "(.*)",', QUICK_START)
    assert len(outputs) == 4
    assert all(outputs)


@pytest.mark.usefixtures("shared")
def test_outputs_of_a_batch_have_the_fields_of_vllm_and_16_tokens(client: Client) -> None:
    """Without parameters, each answer ran to the end of the context."""
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
    ids = client.tokenize("The sky is")
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    with LLM("tiny") as llm:
        by_text, by_ids = llm.generate([{"prompt": "The sky is"}, {"prompt_token_ids": ids}], greedy, use_tqdm=False)
        (one,) = llm.generate({"prompt": "The sky is"}, use_tqdm=False)
        (said,) = llm.chat(parts, replace(greedy, max_tokens=3), use_tqdm=False)
        (whole,) = llm.generate([5] * 2000, replace(greedy, max_tokens=None), use_tqdm=False)
    assert (by_text.prompt, by_text.prompt_token_ids) == ("The sky is", ids)
    assert (by_ids.prompt, by_ids.prompt_token_ids) == (None, ids)
    output = by_text.outputs[0]
    assert output.token_ids == by_ids.outputs[0].token_ids
    assert (len(output.token_ids), output.finish_reason) == (16, "length")
    assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in output.logprobs))
    assert len(one.outputs[0].token_ids) <= 16
    chat = [{"role": "user", "content": "hello"}]
    assert said.outputs[0].text == client.chat(chat, replace(greedy, max_tokens=3)).text
    assert said.prompt_token_ids == client.tokenize(chat)
    assert said.prompt == client.detokenize(said.prompt_token_ids)
    assert len(said.prompt_token_ids) == said.outputs[0].prompt_tokens
    assert len(whole.outputs[0].token_ids) == client.model_info().max_model_len - 2000, "None asks for as many as fit"


def test_a_batch_of_which_the_cluster_is_gone_ends_at_once(cluster: ProcessCluster) -> None:
    """It does not try again until all attempts are used up, and the requests that still ran are cancelled."""

    def gone() -> None:
        raise Unavailable("it ended by itself")

    with LoopThread() as loop:
        batch = _Batch(loop, cluster.grpc, Retries(1000), 8, lambda client, _: client.generate("a", LONG))
        with pytest.raises(Unavailable, match="by itself"):
            batch.run(lambda: None, gone)
        cluster.assert_empty()


def test_batches_of_several_threads_end_where_their_loop_is_closed(cluster: ProcessCluster) -> None:
    """None waits for ever, nothing of them is left, and a later batch is refused."""
    asked: list[int] = []
    ended: list[str] = []

    def ask(client: AsyncClient, i: int) -> Awaitable[RequestOutput]:
        asked.append(i)
        return client.generate("a", LONG)

    def one() -> None:
        try:
            _Batch(loop, cluster.grpc, Retries(1000), 8, ask).run(lambda: None, lambda: None)
        except Unavailable as exc:
            ended.append(exc.message)

    with LoopThread() as loop:
        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(asked) == 24)
    for thread in threads:
        thread.join(BOUND_S)
    assert ended == ["the batch was cancelled, because this LLM was closed"] * 3
    cluster.assert_empty()
    with pytest.raises(Unavailable, match="closed"):
        _Batch(loop, cluster.grpc, Retries(1), 1, ask).run(lambda: None, lambda: None)


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
    with Client(cluster.grpc, retries=Retries(60, longest_wait_s=1.0, wait_for_server=True)) as patient:
        assert patient.generate([5, 6, 7], GREEDY).ids == expected
    cluster.heal()
    cluster.assert_empty()


SCRIPT = """
    import asyncio, os, signal, sys, threading, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
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
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        llm.generate([[5, 6, 7]] * 5000, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        sys.exit("it was not interrupted")
    except KeyboardInterrupt:
        end_s = time.monotonic() + 60.0  # gRPC ends its own tasks a little later
        while len(asyncio.all_tasks(llm._loop.loop)) > 1:  # one is the loop's own
            assert time.monotonic() < end_s
            time.sleep(0.01)
    assert len(llm.generate(["The sky is"], params, use_tqdm=False)) == 1
    print("done", flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "closed":
        llm.close()
        llm.close()
        assert "batches" not in [thread.name for thread in threading.enumerate()]
"""


@pytest.mark.slow
def test_the_example_of_a_batch_runs() -> None:
    program = [sys.executable, str(ROOT / "examples" / "offline_batch.py"), "--model", "tiny", "--max-tokens", "4"]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=4 * BOUND_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) >= 4


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; nothing if it is gone or not ours."""
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}


@pytest.mark.parametrize("how", ["killed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("ended", "closed"))])
def test_a_program_s_own_cluster_ends_with_it(how: str) -> None:
    mark = {"PDSERVE_TEST_PROGRAM": str(uuid.uuid4())}  # what it starts inherits it; other tests run beside this one
    program = [sys.executable, "-c", textwrap.dedent(SCRIPT), how]
    env = {**os.environ, **mark}
    ran = subprocess.run(program, capture_output=True, text=True, timeout=4 * BOUND_S, check=False, env=env)
    assert "done" in ran.stdout, ran.stderr
    assert ran.returncode == (-signal.SIGKILL if how == "killed" else 0), ran.stderr
    assert "Event loop is closed" not in ran.stderr  # gRPC tells a cancelled call's end after the batch
    address = ran.stdout.split()[1]

    def gone() -> bool:
        return not any(mark.items() <= environment_of(process).items() for process in psutil.process_iter())

    eventually(gone)
    with pytest.raises(Unavailable), Client(address, retries=Retries(1)) as client:
        client.model_info()
