"""vLLM's gRPC interface of a real cluster: the answers are those of our own interface, and nothing is left behind."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from real_service import BOUND_S, LONG_OUTPUT, tiny

from pdserve.config import RouterConfig
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

pytestmark = pytest.mark.cluster

PROMPT = [7, 11, 13, 250, 3]
SERVICE = "vllm.grpc.engine.VllmEngine"
Complete = vllm_engine_pb2.GenerateComplete
Request = vllm_engine_pb2.GenerateRequest
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    apart = RouterConfig(colocate_by_cost=False, fairness_key="header:x-tenant")
    with ProcessCluster(tiny(enable_prefix_caching=True), prefill=1, decode=1, router=apart) as running:
        yield running
        running.assert_empty()


@pytest.fixture
def stub(cluster: ProcessCluster) -> Iterator[Any]:
    with grpc.insecure_channel(cluster.grpc) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def asked(ids: list[int] = PROMPT, *, stream: bool = False, request_id: str = "", **sampling: Any) -> Request:
    """Return a request of a gateway."""
    params = vllm_engine_pb2.SamplingParams(**sampling)
    tokenized = vllm_engine_pb2.TokenizedInput(original_text="not what is computed", input_ids=ids)
    return Request(request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream)


def ours(cluster: ProcessCluster, ids: list[int] = PROMPT, **sampling: Any) -> Answer:
    """Return the answer of our own interface."""
    (answer,) = generate_all(cluster.grpc, [request(ids, **sampling)])
    return answer


def whole(stub: Any, message: Request) -> Complete:
    """Return the one message of a whole answer."""
    (told,) = stub.Generate(message, timeout=BOUND_S)
    return told.complete


def failure(call: Any) -> grpc.RpcError:
    """Read a call to its end, which must be an error."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def test_whole_and_streamed_answers_are_those_of_our_own_interface(cluster, stub):
    """Seeded draws with penalties, biases and both kinds of log-probabilities."""
    sampling: dict[str, Any] = {
        "temperature": 0.75, "top_k": 40, "top_p": 0.875, "min_p": 0.03125, "seed": 5, "max_tokens": 24, "min_tokens": 4,
        "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.25,
        "logit_bias": {70: 1.5}, "logprobs": 3, "prompt_logprobs": 2,
    }  # fmt: skip
    want = ours(cluster, **sampling)
    told = whole(stub, asked(**sampling))
    assert list(told.output_ids) == want.ids
    assert (told.finish_reason, told.prompt_tokens, told.completion_tokens) == ("length", len(PROMPT), 24)
    assert list(told.output_logprobs.token_ids) == want.ids
    assert list(told.output_logprobs.token_logprobs) == [one.logprob for one in want.logprobs]
    listed = [tuple(zip(one.token_ids, one.values, strict=True)) for one in told.output_logprobs.top_logprobs]
    assert listed == [one.top for one in want.logprobs]
    read = told.input_logprobs
    assert list(read.token_ids) == PROMPT
    assert [one.HasField("value") for one in read.token_logprobs] == [False, True, True, True, True]
    assert [len(one.token_ids) for one in read.top_logprobs] == [0, 2, 2, 2, 2]

    *chunks, last = stub.Generate(asked(stream=True, **sampling), timeout=BOUND_S)
    parts = [one.chunk for one in chunks]
    assert [token for part in parts for token in part.token_ids] == want.ids == list(last.complete.output_ids)
    assert all(part.completion_tokens == len(part.token_ids) for part in parts)
    assert [value for part in parts for value in part.output_logprobs.token_logprobs] == list(
        told.output_logprobs.token_logprobs
    )
    assert parts[0].input_logprobs == read
    assert not any(part.HasField("input_logprobs") for part in parts[1:])
    assert last.complete.completion_tokens == 24


def test_zeros_mean_what_they_mean_in_vllm(cluster, stub):
    """Nothing but a seed: temperature 1, no filter, one choice, and as many tokens as fit."""
    want = ours(cluster, seed=3, max_tokens=12, ignore_eos=True)
    told = whole(stub, asked(seed=3, max_tokens=12, ignore_eos=True))
    assert list(told.output_ids) == want.ids
    assert (
        whole(stub, asked(seed=-2, max_tokens=8, ignore_eos=True)).output_ids
        == ours(cluster, seed=(1 << 64) - 2, max_tokens=8, ignore_eos=True).ids
    )
    full = [1] * 1900
    unbounded = whole(stub, asked(full, temperature=0.0, ignore_eos=True))
    assert unbounded.completion_tokens == stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()).max_context_length - 1900


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_the_seed_plus_their_index(cluster, stub, stream):
    sampling: dict[str, Any] = {"seed": 9, "max_tokens": 10, "ignore_eos": True}
    told = list(stub.Generate(asked(n=3, stream=stream, **sampling), timeout=BOUND_S))
    ends = {one.complete.index: list(one.complete.output_ids) for one in told if one.HasField("complete")}
    assert ends == {i: ours(cluster, **{**sampling, "seed": 9 + i}).ids for i in range(3)}
    chunks: dict[int, list[int]] = {}
    for one in told:
        if one.HasField("chunk"):
            chunks.setdefault(one.chunk.index, []).extend(one.chunk.token_ids)
    assert chunks == (ends if stream else {})


def test_stops_are_named(cluster, stub):
    """A stop id, and a stop string across whose tokens the ids of the answer go."""
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    plain = ours(cluster, **greedy)
    stopped = whole(stub, asked(stop_token_ids=[plain.ids[6]], **greedy))
    first = plain.ids.index(plain.ids[6])
    assert (stopped.finish_reason, stopped.matched_token_id) == ("stop", plain.ids[6])
    assert list(stopped.output_ids) == plain.ids[: first + 1]
    word = plain.text[4:7]
    cut = whole(stub, asked(stop=[word], skip_special_tokens=True, **greedy))
    assert (cut.finish_reason, cut.matched_stop_str) == ("stop", word)
    assert list(cut.output_ids) == ours(cluster, stop=[word], **greedy).ids
    assert whole(stub, asked(**greedy)).WhichOneof("matched_stop") is None


def test_constraints_hold(stub):
    common: dict[str, Any] = {"seed": 1, "max_tokens": 40}
    choice = vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"])
    for constraint in ({"regex": "(yes|no)"}, {"choice": choice}, {"grammar": 'start: "yes" | "no"'}):
        told = whole(stub, asked(grammar_from_first_token=True, **constraint, **common))
        assert told.finish_reason == "stop"
    tokenizer = tokenizer_of(stub)
    assert tokenizer.decode(list(told.output_ids), skip_special_tokens=True) in ("yes", "no")


def test_a_text_prompt_and_a_large_message_are_read(cluster, stub):
    """The message is larger than what is parsed on the loop, and its ids are few."""
    message = asked(temperature=0.0, max_tokens=6, ignore_eos=True)
    message.tokenized.original_text = "x" * 100_000
    assert list(whole(stub, message).output_ids) == ours(cluster, temperature=0.0, max_tokens=6, ignore_eos=True).ids
    text = Request(text="Once there was", sampling_params=message.sampling_params)
    (want,) = generate_all(cluster.grpc, [request("Once there was", temperature=0.0, max_tokens=6, ignore_eos=True)])
    assert list(whole(stub, text).output_ids) == want.ids


def test_abort_ends_all_calls_of_an_id_and_frees_what_they_held(cluster, stub):
    """Two calls have one id, one of them with two choices. Both end well with the tokens so far; an unknown id is no error."""
    long: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LONG_OUTPUT}
    several = stub.Generate(asked(request_id="same", stream=True, n=2, **long), timeout=BOUND_S)
    alone = stub.Generate(asked(request_id="same", **long), timeout=BOUND_S)
    other = stub.Generate(asked(request_id="other", stream=True, **long), timeout=BOUND_S)
    assert next(several).HasField("chunk")
    assert next(other).HasField("chunk")
    cluster.wait_state(lambda state: state.running_requests == 4, BOUND_S)
    stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["same", "none", "none"]), timeout=BOUND_S)
    ends = [one.complete for one in several if one.HasField("complete")]
    assert sorted((one.index, one.finish_reason) for one in ends) == [(0, "abort"), (1, "abort")]
    assert all(len(one.output_ids) == one.completion_tokens < LONG_OUTPUT for one in ends)
    (told,) = alone
    assert (told.complete.finish_reason, told.complete.prompt_tokens) == ("abort", len(PROMPT))
    cluster.wait_state(lambda state: state.running_requests == 1, BOUND_S)
    other.cancel()
    assert failure(other).code() is grpc.StatusCode.CANCELLED
    state = cluster.wait_state(lambda state: not state.running_requests and not held(state), BOUND_S)
    assert [worker.requests_placed for worker in state.workers] == [0, 0]


def test_abort_of_an_empty_id_ends_no_call_that_has_none(cluster, stub):
    """An empty id names nothing. It ended every call of the client that had no id."""
    long: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LONG_OUTPUT}
    nameless = stub.Generate(asked(stream=True, **long), timeout=BOUND_S)
    named = stub.Generate(asked(request_id="named", stream=True, **long), timeout=BOUND_S)
    assert next(nameless).HasField("chunk")
    assert next(named).HasField("chunk")
    stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["", "named"]), timeout=BOUND_S)
    assert [one.complete.finish_reason for one in named if one.HasField("complete")] == ["abort"]
    assert [one.complete.finish_reason for one in nameless if one.HasField("complete")] == ["length"]


def test_abort_ends_no_call_of_another_client(cluster, stub):
    long: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LONG_OUTPUT}
    call = stub.Generate(asked(request_id="one", stream=True, **long), metadata=(("x-tenant", "a"),), timeout=BOUND_S)
    next(call)
    message = vllm_engine_pb2.AbortRequest(request_ids=["one"])
    stub.Abort(message, metadata=(("x-tenant", "b"),), timeout=BOUND_S)
    assert next(call).HasField("chunk")
    stub.Abort(message, metadata=(("x-tenant", "a"),), timeout=BOUND_S)
    assert [one.complete.finish_reason for one in call if one.HasField("complete")] == ["abort"]


def held(state: inference_pb2.GetClusterStateResponse) -> int:
    """Return the blocks and leases that any worker holds."""
    return sum(one.load.blocks.held + one.load.blocks.quarantined + one.load.leases_held for one in state.workers)


CHOICE = vllm_engine_pb2.ChoiceConstraint(choices=[])
TABLE: dict[str, tuple[Request, list[str]]] = {
    "no prompt": (Request(), ["input"]),
    "no ids": (asked([]), ["input_ids", "empty"]),
    "no text": (Request(text="", sampling_params=vllm_engine_pb2.SamplingParams()), ["text", "empty"]),
    "id out of range": (asked([99_999]), ["input_ids", "99999"]),
    "too many ids": (asked([1] * 9000), ["input_ids", "9000"]),
    "far too many ids": (asked([1] * 90_000), ["input_ids", "90000"]),
    "no output": (asked(max_tokens=0), ["max_tokens", "1"]),
    "too long an output": (asked(max_tokens=9000), ["max_tokens", "9000"]),
    "temperature": (asked(temperature=3.0), ["temperature", "[0, 2]"]),
    "top_p": (asked(top_p=2.0), ["top_p", "[0, 1]"]),
    "top_k": (asked(top_k=(1 << 32) - 1), ["top_k", str(1 << 31)]),
    "penalty": (asked(frequency_penalty=float("nan")), ["frequency_penalty"]),
    "min over max": (asked(max_tokens=4, min_tokens=5), ["min_tokens", "4"]),
    "empty stop": (asked(stop=[""]), ["stop", "1 to 1024"]),
    "many stops": (asked(stop=["a"] * 17), ["stop", "16"]),
    "stop id": (asked(stop_token_ids=[99_999]), ["stop_token_ids", "99999"]),
    "bias": (asked(logit_bias={-1: 1.0}), ["logit_bias", "-1"]),
    "choices": (asked(n=129), ["n", "128"]),
    "all logprobs": (asked(logprobs=-1), ["logprobs", "20"]),
    "all prompt logprobs": (asked(prompt_logprobs=-1), ["prompt_logprobs", "20"]),
    "truncation": (asked(truncate_prompt_tokens=4), ["truncate_prompt_tokens", "never cut"]),
    "schema": (asked(json_schema="{"), ["json_schema"]),
    "regex": (asked(regex="("), ["regex"]),
    "grammar": (asked(grammar="nothing"), ["grammar"]),
    "structural tag": (asked(structural_tag=""), ["structural_tag", "grammar"]),
    "no object": (asked(json_object=False), ["json_object", "true"]),
    "no choice": (asked(choice=CHOICE), ["choice"]),
    "min beside a constraint": (asked(regex="a", min_tokens=1), ["min_tokens", "0"]),
    "request id": (asked(request_id="a\nb"), ["request_id", "printable"]),
    "rank": (Request(text="a", data_parallel_rank=1), ["data_parallel_rank", "0"]),
    "kv": (Request(text="a", kv_transfer_params=vllm_engine_pb2.KvTransferParams()), ["kv_transfer_params"]),
    "kv as json": (Request(text="a", kv_transfer_params_json=""), ["kv_transfer_params_json"]),
    "image": (Request(text="a", mm_inputs=vllm_engine_pb2.MultimodalInputs()), ["mm_inputs"]),
    "more images": (Request(text="a", extra_mm_inputs=[vllm_engine_pb2.MultimodalInputs()]), ["extra_mm_inputs"]),
    "media": (Request(text="a", media_refs=vllm_engine_pb2.MediaRefs()), ["media_refs"]),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_not_served_is_refused_by_name(stub, name):
    message, words = TABLE[name]
    error: Any = failure(stub.Generate(message, timeout=BOUND_S))
    assert error.code() is INVALID
    assert error.details().startswith(f"{words[0]}:"), error.details()
    assert all(word in error.details() for word in words), error.details()
    assert dict(error.trailing_metadata())["pdserve-error-reason"] == "invalid_request"


def test_a_class_is_named_by_metadata(stub):
    error: Any = failure(stub.Generate(asked(), metadata=(("x-slo-class", "none"),), timeout=BOUND_S))
    assert error.code() is INVALID
    assert "slo_class" in error.details()
    call = stub.Generate(asked(max_tokens=1), metadata=(("x-slo-class", "batch"),), timeout=BOUND_S)
    list(call)
    assert '"slo_class":"batch"' in dict(call.trailing_metadata())["pdserve-timeline"]


def test_fields_of_a_newer_release_are_left_out_and_listed(stub):
    known = asked(max_tokens=1).SerializeToString()
    newer = vllm_engine_pb2.GenerateRequest.FromString(
        known + b"\xf8\x01\x05" + b"\x22\x03\xf0\x01\x05"
    )  # 31, and 30 of field 4
    call = stub.Generate(newer, timeout=BOUND_S)
    list(call)
    assert dict(call.initial_metadata())["x-pdserve-ignored-fields"] == "31, sampling_params.30"


def test_garbage_is_the_fault_of_the_client(cluster):
    with grpc.insecure_channel(cluster.grpc) as channel:
        error: Any = failure(channel.unary_stream(f"/{SERVICE}/Generate")(b"\xff" * 100, timeout=BOUND_S))
    assert error.code() is INVALID


def test_a_gateway_is_told_what_the_router_knows(cluster, stub):
    seqs = cluster.engine.limits("cpu", "decode").max_num_seqs
    assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=BOUND_S).healthy
    with grpc.insecure_channel(cluster.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=BOUND_S)
        own = inference_pb2_grpc.InferenceStub(channel).GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=BOUND_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    model = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=BOUND_S)
    assert (model.served_model_name, model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (
        own.model, own.max_model_len, own.vocab_size, list(own.eos_token_ids),
    )  # fmt: skip
    server = stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=BOUND_S)
    assert (server.max_num_seqs, server.block_size, server.server_type) == (
        seqs, own.block_size, "vllm-grpc",
    )  # fmt: skip
    running = stub.Generate(asked(stream=True, temperature=0.0, ignore_eos=True, max_tokens=LONG_OUTPUT), timeout=BOUND_S)
    next(running)
    cluster.wait_state(lambda _: any(one.num_running_reqs == 1 and one.num_used_tokens > 0 for one in loads(stub)), BOUND_S)
    running.cancel()
    (load,) = loads(stub)
    assert load.max_total_num_tokens > load.num_used_tokens
    assert load.max_running_requests == seqs
    for wrong in (vllm_engine_pb2.GetLoadsRequest(dp_rank=1), vllm_engine_pb2.GetLoadsRequest(include=["memory"])):
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetLoads(wrong, timeout=BOUND_S)
        assert caught.value.code() is INVALID


def loads(stub: Any) -> list[Any]:
    """Return the loads that a gateway polls."""
    return list(stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(include=["core"]), timeout=BOUND_S).loads)


def tokenizer_of(stub: Any) -> tokenizers.Tokenizer:
    """Fetch the tokenizer as a gateway does."""
    *chunks, last = stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest(), timeout=BOUND_S)
    archive = b"".join(one.data for one in (*chunks, last))
    assert not any(one.sha256 for one in chunks)
    assert last.sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        return tokenizers.Tokenizer.from_str(files.read("tokenizer.json").decode())


def test_the_tokenizer_of_the_router_is_handed_out(cluster, stub):
    with grpc.insecure_channel(cluster.grpc) as channel:
        asked_ids = inference_pb2.TokenizeRequest(text="Hello there")
        ids = inference_pb2_grpc.InferenceStub(channel).Tokenize(asked_ids, timeout=BOUND_S).ids
    assert tokenizer_of(stub).encode("Hello there").ids == list(ids)


def test_methods_that_are_not_served_say_so(stub):
    for method, message in (
        (stub.Embed, vllm_engine_pb2.EmbedRequest()),
        (stub.FlushCache, smg_common_pb2.FlushCacheRequest()),
        (stub.StartProfile, smg_common_pb2.StartProfileRequest()),
        (stub.StopProfile, smg_common_pb2.StopProfileRequest()),
        (lambda *args, **kwargs: list(stub.SubscribeKvEvents(*args, **kwargs)), smg_common_pb2.SubscribeKvEventsRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            method(message, timeout=BOUND_S)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "is not served" in error.details()
