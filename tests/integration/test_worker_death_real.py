"""Workers that die or are told to stop under their requests: the requests end as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from real_service import (
    APART,
    AUTO,
    BOUND_S,
    GREEDY,
    LONG_PROMPT,
    QUICK_BEATS,
    TOGETHER,
    OpenStream,
    long_prefill,
    long_stream,
    serving,
    tiny,
    wait_prefilling,
)

from pdserve.config import RouterConfig
from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import common_pb2, open_inference_pb2, vllm_engine_pb2
from pdserve.rpc.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub as Kserve
from pdserve.rpc.v1.vllm_engine_pb2_grpc import VllmEngineStub as VllmEngine
from testkit.client import Answer, generate_all, request
from testkit.load import Load
from testkit.processes import ProcessCluster, State
from testkit.told_worker import Hold

MANY = 120  # tokens
HELD = 100  # tokens: a worker that is held here has sent the first ones and has many to go
CROWD = 5000  # requests: more than both decode workers serve while a third worker starts, however slowly
BOTH = ("prefill-0", "decode-0")

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="module")
def cluster(hold: Hold) -> Iterator[ProcessCluster]:
    """Four tokens a step: a long prompt takes 450 steps."""
    rules_only = RouterConfig(colocate_by_cost=False)  # measured costs differ from run to run
    places = hold.places("prefill-0", "decode-0", "decode-1")
    engine = tiny(max_num_batched_tokens=4)
    with ProcessCluster(engine, prefill=1, decode=2, router=rules_only, worker=QUICK_BEATS, places=places) as running:
        yield running


def ask(cluster: ProcessCluster, placement: common_pb2.Placement) -> Answer:
    return generate_all(cluster.grpc, [request("hello there", placement, max_tokens=8, **GREEDY)])[0]


def kill(cluster: ProcessCluster, worker_id: str) -> None:
    cluster.processes[worker_id].popen.kill()
    cluster.processes[worker_id].stop()


def start_again(cluster: ProcessCluster, worker_id: str) -> None:
    """The same id, a new process; returns once the router places on it."""
    cluster.start_worker(worker_id)
    cluster.wait_state(lambda state: any(w.hello.worker_id == worker_id and w.ready for w in state.workers), BOUND_S)


@pytest.mark.parametrize("placement", [APART, pytest.param(TOGETHER, marks=pytest.mark.slow)], ids=["apart", "together"])
def test_a_killed_decode_worker_costs_its_stream_nothing_but_time(cluster, hold, placement):
    """(1) It dies in the middle of a stream. (2) The stream goes on where it stopped and ends like an undisturbed one.
    (3) The worker comes back and serves."""
    message = request("hello there", placement, max_tokens=MANY, **GREEDY)
    expected = generate_all(cluster.grpc, [message])[0]
    with hold.at(HELD), OpenStream(cluster, message) as stream:
        early = stream.read(5)
        victim = serving(cluster)
        kill(cluster, victim)
        hold.release()
        late = stream.read(MANY)
        assert early + late == expected.ids
        assert stream.report.attempts == 2
    cluster.assert_empty()
    start_again(cluster, victim)
    end_s = time.monotonic() + BOUND_S
    while True:  # its death counts as load for a while, so its first turn may be the tenth pick
        answer = ask(cluster, placement)
        assert answer.ids == expected.ids[: len(answer.ids)]
        if answer.report.decode_worker == victim:
            break
        assert time.monotonic() < end_s


@pytest.mark.slow
def test_streams_of_other_protocols_outlive_a_killed_decode_worker(cluster, hold):
    """KServe's and vLLM's, two of each, so that either worker has some: the texts and ids of an undisturbed run."""

    def asked() -> tuple[list[Any], list[Any]]:
        told = [Kserve(channel).ModelStreamInfer(iter([infer_message()]), timeout=2 * BOUND_S) for _ in range(2)]
        return told, [VllmEngine(channel).Generate(engine_message(), timeout=2 * BOUND_S) for _ in range(2)]

    with grpc.insecure_channel(cluster.grpc) as channel:
        infers, engines = asked()
        texts, ids = {*map(text_of, infers)}, {*map(ids_of, engines)}
        assert (len(texts), len(ids)) == (1, 1)
        with hold.at(HELD):
            infers, engines = asked()
            for call in (*infers, *engines):
                next(call)
            cluster.wait_state(lambda state: state.running_requests == 4, BOUND_S)
            victim = next(
                w.hello.worker_id for w in cluster.state().workers if "decode" in w.hello.worker_id and w.requests_placed
            )
            kill(cluster, victim)
            hold.release()
            assert all(next(iter(texts)).endswith(text_of(call)) for call in infers)
            assert {*map(ids_of, engines)} == ids
    cluster.assert_empty()
    start_again(cluster, victim)


def infer_message() -> open_inference_pb2.ModelInferRequest:
    message = open_inference_pb2.ModelInferRequest(model_name="tiny")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello there")
    message.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    message.parameters["max_tokens"].int64_param = MANY
    message.parameters["temperature"].double_param = 0.0
    message.parameters["ignore_eos"].bool_param = True
    return message


def text_of(call: Any) -> str:
    """What is left of a stream of KServe's."""
    parts = list(call)
    assert not any(part.error_message for part in parts)
    return "".join(part.infer_response.raw_output_contents[0][4:].decode() for part in parts)


def engine_message() -> vllm_engine_pb2.GenerateRequest:
    tokens = vllm_engine_pb2.TokenizedInput(input_ids=[7, 11, 13])
    params = vllm_engine_pb2.SamplingParams(max_tokens=MANY, temperature=0.0, ignore_eos=True)
    return vllm_engine_pb2.GenerateRequest(tokenized=tokens, sampling_params=params, stream=True)


def ids_of(call: Any) -> tuple[int, ...]:
    """All ids of a stream of vLLM's: its last message has them."""
    *_, last = call
    return tuple(last.complete.output_ids)


@pytest.mark.slow  # the short tests have it of the core: tests/router/core/recovery/test_lost_workers.py
def test_a_killed_prefill_worker_leaves_its_prompts_to_decode(cluster, hold):
    """(1) It dies in the middle of a prompt. (2) That prompt is computed again, colocated for want of another. (3) Who
    insists on two pools is refused. (4) It comes back under its id and KV moves again."""
    expected = ask(cluster, APART).ids
    with hold.at(HELD), long_prefill(cluster, AUTO) as stream:
        wait_prefilling(cluster)
        kill(cluster, "prefill-0")
        hold.release()
        assert len(stream.read(4)) == 4
        # The reader's failed pull may be heard before the broken link: then the other decode worker asks the dead one too.
        assert stream.report.attempts in (2, 3)
        assert (stream.report.placement, stream.report.placement_reason) == (TOGETHER, "prefill_pool_empty")
    cluster.assert_empty()
    with OpenStream(cluster, request("hello there", APART, max_tokens=8)) as stream:
        error = stream.failure()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata())[REASON_METADATA] == "unavailable"
    start_again(cluster, "prefill-0")
    answer = ask(cluster, AUTO)
    assert (answer.ids, answer.report.prefill_worker) == (expected, "prefill-0")
    assert answer.report.kv_bytes > 0


@pytest.mark.slow
def test_a_prefill_worker_that_comes_back_while_decode_is_full_serves_again(cluster):
    """(1) It dies. (2) More requests come than decode has slots, and refill each as it gets free. (3) It comes back, and its
    probe gets through while they do."""
    kill(cluster, "prefill-0")
    cluster.wait_state(lambda state: len(state.workers) == 2, BOUND_S)
    crowd = [request(f"hello {n}", AUTO, max_tokens=200, **GREEDY) for n in range(CROWD)]
    with Load(cluster.grpc, crowd, concurrency=24) as load:
        cluster.wait_state(lambda state: state.queued_requests > 8, BOUND_S)
        start_again(cluster, "prefill-0")
        assert sum(not outcome.done for outcome in load.outcomes) > 24, "they had ended before: nothing was full"
    assert ask(cluster, APART).report.kv_bytes > 0


def test_requests_that_run_out_of_time_leave_a_healthy_pair_alone(cluster):
    """The decode worker says so a moment before the router's tick; that was taken for a failed transfer, and everybody's
    prompts were computed on decode for the next seconds."""
    hurried = request(LONG_PROMPT, APART, max_tokens=4)
    hurried.deadline_s = 0.3
    for _ in range(5):
        with OpenStream(cluster, hurried) as stream:
            assert stream.failure().code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not cluster.state().set_aside_pairs
    assert ask(cluster, AUTO).report.prefill_worker == "prefill-0"


@pytest.mark.slow
def test_a_prefill_worker_killed_after_its_handoff_is_not_missed(cluster):
    """The KV has been committed: the stream does not depend on the prefill worker any more."""
    with long_stream(cluster, APART) as stream:
        stream.read(5)
        kill(cluster, "prefill-0")
        assert len(stream.read(200)) >= 200
        stream.cancel()
    start_again(cluster, "prefill-0")
    assert ask(cluster, APART).report.kv_bytes > 0


@pytest.mark.slow
def test_without_prefill_workers_everything_is_colocated_or_refused():
    """At last SIGTERM ends worker and router with 0; between the two a request is refused at once."""
    with ProcessCluster(tiny(), prefill=0, decode=1, worker=QUICK_BEATS) as cluster:
        answers = [ask(cluster, placement) for placement in (AUTO, TOGETHER)]
        assert answers[0].ids == answers[1].ids
        assert {answer.report.placement for answer in answers} == {TOGETHER}
        with OpenStream(cluster, request("hello there", APART, max_tokens=8)) as stream:
            error = stream.failure()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no prefill worker" in error.details()
        cluster.assert_empty()

        for name in ("decode-0", "router"):
            process = cluster.processes[name].popen
            process.terminate()
            assert process.wait(BOUND_S) == 0, cluster.processes[name].log()
            if name == "decode-0":
                cluster.wait_state(lambda state: not state.workers, BOUND_S)
                with OpenStream(cluster, request("hello there", AUTO, max_tokens=8)) as stream:
                    assert stream.failure().code() is grpc.StatusCode.UNAVAILABLE


def terminate_both(cluster: ProcessCluster) -> None:
    for name in BOTH:
        cluster.processes[name].popen.terminate()


def both_drain(state: State) -> bool:
    return {worker.hello.worker_id for worker in state.workers if worker.draining} == set(BOTH)


def test_sigterm_under_load_drains_both_roles_and_loses_nothing(hold):
    """(1) Both are told to stop in the middle of a prompt and of an answer. (2) Nothing new is taken. (3) Both requests
    end well: decode could not have left before it had the prompt's KV. (4) Both exit with 0."""
    with (
        ProcessCluster(
            tiny(dtype="bfloat16", max_num_batched_tokens=16), worker=QUICK_BEATS, places=hold.places(*BOTH)
        ) as cluster,
        hold.at(HELD),
        long_prefill(cluster) as prompt,
        long_stream(cluster, TOGETHER, MANY) as answer,
    ):
        wait_prefilling(cluster)
        read = len(answer.read(5))
        terminate_both(cluster)
        cluster.wait_state(both_drain, BOUND_S)
        hold.release()
        assert len(prompt.read(4)) == 4
        assert read + len(answer.read(MANY - read)) == MANY
        for name in BOTH:
            assert cluster.processes[name].popen.wait(BOUND_S) == 0, cluster.processes[name].log()
        cluster.wait_state(lambda state: not state.workers, BOUND_S)


@pytest.mark.slow
def test_a_second_sigterm_stops_at_once(hold):
    """(1) Both are told to stop, and act on it. (2) Told again, they leave with their work undone. (3) Their requests end with
    a clean error where nobody is left to take them over. (4) Both exit with 0."""
    engine, router = tiny(max_num_batched_tokens=4), RouterConfig(recovery_wait_s=1.0)
    with (
        ProcessCluster(engine, router=router, worker=QUICK_BEATS, places=hold.places(*BOTH)) as cluster,
        hold.at(HELD),
        long_prefill(cluster) as prompt,
        long_stream(cluster, TOGETHER) as answer,
    ):
        wait_prefilling(cluster)
        answer.read(5)
        terminate_both(cluster)
        cluster.wait_state(both_drain, BOUND_S)
        terminate_both(cluster)
        cluster.wait_state(lambda state: not state.workers, BOUND_S)
        hold.release()
        for name in BOTH:
            assert cluster.processes[name].popen.wait(BOUND_S) == 0, cluster.processes[name].log()
        assert prompt.failure().code() is grpc.StatusCode.UNAVAILABLE
        assert answer.failure().code() is grpc.StatusCode.UNAVAILABLE
