"""Clusters of workers that drive servers of vLLM, under a real router: what users get, and what faults cost.

The stand-ins give each prompt one right output, so a wrong KV, a lost token and a token that comes twice are all seen.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import httpx2
import psutil
import pytest
from stand_ins import engine, expected, prompt_of

from pdserve.checkpoint.resolve import resolve
from pdserve.client import AdminClient, CallFailed
from pdserve.config import EngineConfig, RouterConfig
from pdserve.rpc.v1 import admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from testkit.client import Answer, generate_all, request
from testkit.processes import BOUND_S, Place, ProcessCluster

pytestmark = pytest.mark.cluster

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LENGTHS = (1, 15, 16, 17, 32, 40, 100, 200)
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS * 3)]


def check(answers: list[Answer], max_tokens: int = 12) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.ids == expected(prompt, max_tokens)


def ask_all(cluster: ProcessCluster, concurrency: int, max_tokens: int = 12) -> list[Answer]:
    messages = [request(prompt, max_tokens=max_tokens, **GREEDY) for prompt in PROMPTS]
    return generate_all(cluster.grpc, messages, concurrency)


def test_prompts_go_where_their_beginnings_are() -> None:
    """The engines tell of the blocks that they share, in hashes of their own; the router finds them by its names of prompts."""
    beginnings = [prompt_of(160, seed) for seed in range(6)]
    with ProcessCluster(engine(prefix_caching=True), prefill=2, decode=2) as cluster:

        def ask(number: int) -> list[Answer]:
            prompts = [[*beginning, 9, number] for beginning in beginnings]
            return generate_all(cluster.grpc, [request(one, max_tokens=4, **GREEDY) for one in prompts], 1)

        def shared(state: object) -> bool:
            return sum(worker.load.blocks.cached for worker in state.workers) >= 2 * 6 * 9  # type: ignore[attr-defined]

        before = ask(0)
        cluster.wait_state(shared)
        time.sleep(1.5)  # two heartbeats: the keys follow each of them
        after = ask(1)
        places = [[(a.report.prefill_worker, a.report.decode_worker) for a in answers] for answers in (before, after)]
        assert places[0] == places[1]
        assert len({worker for worker, _ in places[0]}) == 2, "both have some"


def servers_of(cluster: ProcessCluster, name: str) -> list[psutil.Process]:
    """The guard of a worker's server, and the server."""
    return psutil.Process(cluster.processes[name].popen.pid).children(recursive=True)


def test_a_cluster_serves_as_one_server_would_and_says_that_it_is_foreign() -> None:
    with ProcessCluster(engine(), decode=2) as cluster:
        state = cluster.state()
        assert (state.foreign, state.exact) == (True, False)
        assert {worker.hello.engine for worker in state.workers} == {"vllm 0.32.0"}
        alone, together = ask_all(cluster, 1), ask_all(cluster, 24)
        check(alone)
        check(together)
        assert {(a.report.foreign, a.report.exact) for a in alone} == {(True, False)}
        assert {a.report.placement for a in alone} == {common_pb2.PLACEMENT_DISAGGREGATED}
        penalised = request(PROMPTS[5], max_tokens=6, presence_penalty=0.5, **GREEDY)
        (answer,) = generate_all(cluster.grpc, [penalised])
        assert (answer.report.placement, answer.report.placement_reason) == (common_pb2.PLACEMENT_COLOCATED, "undivided")
        apart = request(PROMPTS[5], common_pb2.PLACEMENT_DISAGGREGATED, max_tokens=6, presence_penalty=0.5, **GREEDY)
        with pytest.raises(BaseExceptionGroup) as refused:
            generate_all(cluster.grpc, [apart])
        wrong = refused.value.exceptions[0]
        assert isinstance(wrong, grpc.RpcError)
        assert wrong.code() is grpc.StatusCode.INVALID_ARGUMENT, "no client tries it again"
        assert "placement" in str(wrong)
        assert "presence_penalty" in str(wrong)
        with (
            AdminClient(cluster.admin) as operator,
            pytest.raises(CallFailed, match=r"engine\.max_num_batched_tokens .*--max-num-seqs"),
        ):
            operator.set_budget(["decode-0"], common_pb2.ROLE_UNSPECIFIED, 256)
        undrafted = request(PROMPTS[5], max_tokens=6, **GREEDY)
        undrafted.speculation = "off"
        for unknown, field in ((request(PROMPTS[5], max_tokens=6, prompt_logprobs=1, **GREEDY), "prompt_logprobs"),
                               (undrafted, "speculation")):  # fmt: skip
            with pytest.raises(BaseExceptionGroup) as refused:
                generate_all(cluster.grpc, [unknown])
            assert f"{field}: " in str(refused.value.exceptions[0])


def test_streams_go_on_when_one_of_two_decode_workers_is_killed() -> None:
    with ProcessCluster(engine(step_s=0.02), decode=2) as cluster:
        server = servers_of(cluster, "decode-0")
        assert len(server) == 2
        killer = threading.Timer(1.0, cluster.processes["decode-0"].kill)
        killer.start()
        answers = ask_all(cluster, 24, max_tokens=100)
        killer.join()
        check(answers, 100)
        assert any(answer.report.attempts > 1 for answer in answers), "nobody was on it"
        _gone, left = psutil.wait_procs(server, timeout=10)
        assert not left, "the server outlives its worker"


@pytest.mark.parametrize("end", ["drained", "killed"])
def test_an_output_under_a_grammar_stays_with_its_worker(end: str) -> None:
    """vLLM cannot take it up elsewhere: a drain waits for its end, and a loss is told at once, not after some attempts."""
    message = request(PROMPTS[5], max_tokens=300, **GREEDY)
    message.structured_outputs.json_object = True
    with ProcessCluster(engine(step_s=0.02), decode=2) as cluster, grpc.insecure_channel(cluster.grpc) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=BOUND_S)
        parts = [next(stream), next(stream)]
        serving = cluster.wait_state(lambda state: any(worker.load.running_sequences for worker in state.workers))
        (name,) = [worker.hello.worker_id for worker in serving.workers if worker.load.running_sequences]
        if end == "killed":
            cluster.processes[name].kill()
            with pytest.raises(grpc.RpcError) as lost:
                list(stream)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "after 1 attempt (the engines cannot take up an output again under structured_outputs)" in str(lost.value)
        else:
            with grpc.insecure_channel(cluster.admin) as admin:
                drain = admin_pb2_grpc.AdminStub(admin).Drain(inference_pb2.DrainRequest(worker_id=name), timeout=BOUND_S)
                parts += list(stream)
                assert list(drain)[-1].done
            assert [token_id for part in parts for token_id in part.ids] == expected(PROMPTS[5], 300)
            assert (parts[-1].report.attempts, parts[-1].report.decode_worker) == (1, name)


def test_the_loss_of_the_only_decode_worker_is_a_typed_error() -> None:
    with ProcessCluster(engine(step_s=0.05), router=RouterConfig(recovery_wait_s=1.0)) as cluster:
        threading.Timer(1.0, cluster.processes["decode-0"].kill).start()
        with pytest.raises(BaseExceptionGroup) as lost:
            ask_all(cluster, 24, max_tokens=200)
        assert {exc.code() for exc in lost.value.exceptions} <= {grpc.StatusCode.UNAVAILABLE}


FAULTS = ["die_at", "error_at", "cut_at", "short_at", "long_at", "nonsense_at", "blocks_short_at"]


@pytest.mark.quick("decode-die_at", "prefill-blocks_short_at", "decode-cut_at")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_an_engine_that_misbehaves_costs_nobody_a_token(pool: str, fault: str) -> None:
    """The fourth request at one of two engines goes wrong, after the probes of the start. The KV of what goes wrong at its
    reader stays for vLLM's own time."""
    place = Place(worker={"engine": engine(lease_s=1.0, **{fault: 4})})
    with ProcessCluster(engine(lease_s=1.0), prefill=2, decode=2, places={f"{pool}-0": place}) as cluster:
        check(ask_all(cluster, 8))
        if fault == "die_at":
            cluster.processes[f"{pool}-0"].popen.wait(30)
        cluster.heal()


def test_a_prefill_server_that_ends_between_its_ticket_and_the_read_costs_a_replay() -> None:
    place = Place(worker={"engine": engine(lease_s=1.0, leave_at=4)})
    with ProcessCluster(engine(lease_s=1.0), prefill=2, places={"prefill-0": place}) as cluster:
        answers = ask_all(cluster, 8)
        check(answers)
        assert any(answer.report.attempts > 1 for answer in answers)
        cluster.processes["prefill-0"].popen.wait(30)
        cluster.move("prefill-0", Place())
        cluster.heal()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_an_engine_that_hangs_is_given_up(pool: str) -> None:
    """It tells its load, and answers one request never."""
    place = Place(worker={"engine": engine(hang_at=4, step_timeout_s=2.0)})
    with ProcessCluster(engine(lease_s=1.0), prefill=2, decode=2, places={f"{pool}-0": place}) as cluster:
        check(ask_all(cluster, 8))
        cluster.processes[f"{pool}-0"].popen.wait(30)
        cluster.heal()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["bad_metrics", "silent_metrics"])
def test_an_engine_whose_load_is_unknown_is_given_up(fault: str) -> None:
    place = Place(worker={"engine": engine(step_timeout_s=2.0, **{fault: True})})
    with ProcessCluster(engine(), decode=2, places={"decode-0": place}) as cluster:
        check(ask_all(cluster, 8))
        worker = cluster.processes["decode-0"]
        worker.popen.wait(30)
        assert "load" in worker.log()
        cluster.move("decode-0", Place())
        cluster.heal()


def why_never_whole(cluster: ProcessCluster) -> str:
    """Return what the members of a cluster say that never has all its workers."""
    cluster.wait_whole = lambda timeout_s=5.0: ProcessCluster.wait_whole(cluster, 5.0)  # type: ignore[method-assign]
    with pytest.raises(TimeoutError) as never:
        cluster.__enter__()
    return str(never.value)


def test_engines_of_two_releases_are_no_pair() -> None:
    place = Place(worker={"engine": engine(release="0.33.0")})
    assert "digest" in why_never_whole(ProcessCluster(engine(), places={"decode-0": place}))


def test_a_pool_of_pdserve_beside_a_pool_of_vllm_is_refused() -> None:
    own = EngineConfig(model="tiny", threads=1, max_model_len=512)
    mixed = ProcessCluster(engine(), places={"decode-0": Place(worker={"engine": own})})
    assert "KV layouts differ" in why_never_whole(mixed)


def test_a_server_that_runs_already_is_used_and_left_alone(tmp_path: Path) -> None:
    with ProcessCluster(engine(), prefill=0) as cluster:
        (_guard, server) = servers_of(cluster, "decode-0")
        port = server.cmdline()[server.cmdline().index("--port") + 1]
        named = replace(engine(), vllm=type(engine().vllm)(url=f"http://127.0.0.1:{port}"))
        with ProcessCluster(named, prefill=0) as attached:
            check(ask_all(attached, 8))
        assert server.is_running()
        wrong = replace(named, model="default")
        with pytest.raises(RuntimeError, match="name the same model"), ProcessCluster(wrong, prefill=0):
            pass
        check(ask_all(cluster, 8))


def test_a_model_that_pdserve_does_not_read_is_served(tmp_path: Path) -> None:
    """Only its tokenizer and its shape are read here."""
    model = tmp_path / "model"
    shutil.copytree(resolve("tiny"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["UnheardOfForCausalLM"], "odd_setting": 1}))
    with ProcessCluster(replace(engine(), model=str(model))) as cluster:
        check(ask_all(cluster, 8))
    own = EngineConfig(model=str(model), threads=1)
    with pytest.raises(RuntimeError, match="UnheardOfForCausalLM is not supported"), ProcessCluster(own):
        pass


def test_without_vllm_a_worker_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = replace(engine(), vllm=type(engine().vllm)())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="make setup-vllm"), ProcessCluster(missing, prefill=0):
        pass


def test_a_cancelled_stream_stops_at_its_server() -> None:
    with ProcessCluster(engine(step_s=0.02)) as cluster:
        with grpc.insecure_channel(cluster.grpc) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPTS[6], max_tokens=400, **GREEDY))
            next(iter(call))
            call.cancel()
        cluster.assert_empty()
        server = servers_of(cluster, "prefill-0")[-1].cmdline()
        page = httpx2.get(f"http://127.0.0.1:{server[server.index('--port') + 1]}/metrics", trust_env=False).text
        assert 'nixl_num_kv_expired_reqs_total{engine="0"} 0' in page, "it waited for vLLM's own time"
