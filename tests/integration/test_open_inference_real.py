"""The Open Inference Protocol as NVIDIA's `tritonclient` speaks it, and Triton's generate extension, on a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from real_service import BOUND_S, LONG_OUTPUT, QUICK_BEATS, RawHttp, ended, tiny, wait_holding

from pdserve.config import RouterConfig
from pdserve.rpc.v1 import open_inference_pb2 as pb
from pdserve.rpc.v1 import open_inference_pb2_grpc
from testkit.processes import ProcessCluster
from testkit.told_worker import Hold

pytestmark = pytest.mark.cluster

MODEL = "tiny"
SPEAKER = Path(__file__).with_name("triton_speaker.py")
PROMPT = "Once there was"
DRAWN: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True}
"""The parameters of the speaker, in numbers."""
HELD = 100  # tokens: a request that is held here has not ended when its client leaves
WIRES = ("http", "grpc")


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="module")
def cluster(hold: Hold) -> Iterator[ProcessCluster]:
    rules_only = RouterConfig(colocate_by_cost=False)  # measured costs differ from run to run
    places = hold.places("prefill-0", "decode-0")
    engine = tiny(dtype="bfloat16")
    with ProcessCluster(engine, prefill=1, decode=1, router=rules_only, worker=QUICK_BEATS, places=places) as running:
        yield running


@pytest.fixture(scope="module")
def spoken(cluster: ProcessCluster) -> dict[str, Any]:
    """What the client saw. A warning of it fails."""
    command = [sys.executable, "-W", "error", str(SPEAKER), cluster.http, cluster.grpc, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * BOUND_S)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def post(cluster: ProcessCluster, path: str, body: Any) -> tuple[int, str, bytes]:
    """The status, the media type and the body of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    wanted = urllib.request.Request(f"http://{cluster.http}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(wanted, timeout=BOUND_S) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.headers["content-type"], exc.read()


@pytest.fixture(scope="module")
def completion(cluster: ProcessCluster) -> dict[str, Any]:
    """The same request by OpenAI's API."""
    status, _, body = post(cluster, "/v1/completions", {"prompt": PROMPT, **DRAWN})
    assert status == 200
    told: dict[str, Any] = json.loads(body)
    return told


@pytest.mark.parametrize("wire", WIRES)
def test_the_server_and_its_model_describe_themselves(spoken: dict[str, Any], wire: str) -> None:
    told = spoken[wire]
    assert told["states"] == [True, True, True]
    assert told["server"]["name"] == "pdserve"
    assert told["server"]["extensions"] == ["binary_tensor_data", "parameters", "generate"]
    assert (told["metadata"]["name"], told["metadata"]["versions"]) == (MODEL, ["1"])
    tensors = {one["name"]: (one["datatype"], [int(size) for size in one["shape"]]) for one in told["metadata"]["inputs"]}
    assert tensors["text_input"] == tensors["sampling_parameters"] == ("BYTES", [1])
    assert tensors["stream"] == tensors["exclude_input_in_output"] == ("BOOL", [1])
    outputs = [(one["name"], one["datatype"]) for one in told["metadata"]["outputs"]]
    assert outputs[0] == ("text_output", "BYTES")
    assert ("num_output_tokens", "UINT32") in outputs


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_has_the_tokens_of_a_completion(spoken: dict[str, Any], completion: dict[str, Any], wire: str) -> None:
    """In binary and in JSON, with parameters beside the tensors and in one. Numbers may be texts, as in Triton's sample."""
    (choice,) = completion["choices"]
    usage = completion["usage"]
    asked = {
        "text_output": choice["text"],
        "finish_reason": choice["finish_reason"],
        "num_input_tokens": usage["prompt_tokens"],
        "num_output_tokens": usage["completion_tokens"],
    }
    told = spoken[wire]
    assert told["asked"] == asked
    assert told["by tensor"] == {"text_output": choice["text"]}
    assert told["one output"] == {"num_output_tokens": 12}
    assert told["bare"] == spoken["json alone"]
    assert told["bare"]["text_output"].startswith(PROMPT)


REFUSED: dict[str, tuple[bool, str, str]] = {
    "unknown model": (True, "model: 'other'", "'tiny'"),
    "unknown version": (True, "version: '2'", "'1'"),
    "model of a request": (True, "model: 'other'", "'tiny'"),
    "batch": (False, "text_input: shape", "[1], got [2]"),
    "rank": (False, "text_input: shape", "[1], got [1, 1]"),
    "datatype": (False, "text_input: datatype", "BYTES, got 'INT32'"),
    "no prompt": (False, "text_input: ", "missing"),
    "empty prompt": (False, "text_input: ", "empty"),
    "twice": (False, "text_input: ", "twice"),
    "unknown input": (False, "inputs: 'image'", "text_input"),
    "unknown output": (False, "outputs: 'logprobs'", "text_output"),
    "unknown parameter": (False, "lora_name: ", "max_tokens"),
    "parameter twice": (False, "seed: is given twice", "sampling_parameters"),
    "parameter out of range": (False, "max_tokens: ", "from 1 to"),
    "parameter of a wrong type": (False, "seed: ", "integer"),
    "no JSON": (False, "sampling_parameters: ", "JSON"),
    "stream": (False, "stream: ", "false"),
    "sequence": (False, "sequence_", "not a parameter"),
    "classes": (False, "text_output.parameters.classification: ", "not supported"),
    "longer than the context": (False, "text_input: ", "2048"),
    "id": (False, "id: ", "128"),
    "timeout": (False, "timeout: ", "got -5"),
}
"""Of each bad request: whether what it names is not there, how the message begins, and what else it says."""


@pytest.mark.parametrize("wire", WIRES)
def test_a_bad_request_is_told_its_field_and_its_limit(spoken: dict[str, Any], wire: str) -> None:
    assert {*spoken[wire]["refused"]} == {*REFUSED}
    codes = {"http": ("400", "404"), "grpc": ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")}[wire]
    for case, (status, message) in spoken[wire]["refused"].items():
        is_unknown, begins, says = REFUSED[case]
        assert status == codes[is_unknown], (case, message)
        assert message.startswith(begins), (case, message)
        assert says in message, (case, message)


def test_a_method_that_only_triton_has_is_unimplemented_by_name(spoken: dict[str, Any]) -> None:
    assert spoken["config"] == ["StatusCode.UNIMPLEMENTED", "ModelConfig: is not implemented by pdserve"]


def test_requests_of_one_stream_run_side_by_side(spoken: dict[str, Any], completion: dict[str, Any]) -> None:
    """One with `stream` has a message for each delta, and the last one says so; a bad one costs no other one."""
    streamed = spoken["streamed"]
    (choice,) = completion["choices"]
    steps = streamed["steps"]
    assert "".join(one["text_output"] for one in steps) == choice["text"]
    assert sum(one["num_output_tokens"] for one in steps) == 12
    assert [one["final"] for one in steps] == [False] * (len(steps) - 1) + [True]
    assert [one["finish_reason"] for one in steps] == ["None"] * (len(steps) - 1) + ["length"]
    assert len(steps) > 1
    (whole,) = streamed["whole"]
    assert whole == {"text_output": PROMPT + choice["text"], "final": True, "model": [MODEL, "1"]}
    begins = sorted(one["message"].partition(" ")[0] for one in streamed["errors"])
    assert begins == ["exclude_input_in_output:", "temperature:", "text_input:"]


# Triton's generate extension ------------------------------------------------------------------------------------------


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream."""
    return [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n") if part]


@pytest.mark.parametrize("path", [f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/versions/1"])
def test_generate_whole_and_streamed_is_a_completion(cluster: ProcessCluster, completion: dict[str, Any], path: str) -> None:
    """Fields stand in the object or in `parameters`, and without `stream` a stream has one event."""
    (choice,) = completion["choices"]
    named = {"model_name": MODEL, "model_version": "1"}
    flat = {"text_input": PROMPT, **DRAWN, "exclude_input_in_output": True}
    status, media, body = post(cluster, f"{path}/generate", {**flat, "return_num_output_tokens": True})
    assert (status, media) == (200, "application/json")
    assert json.loads(body) == {**named, "text_output": choice["text"], "num_output_tokens": 12}
    apart = {"text_input": PROMPT, "parameters": {**DRAWN, "stream": True}, "return_finish_reason": True}
    status, media, body = post(cluster, f"{path}/generate_stream", apart)
    assert (status, media) == (200, "text/event-stream; charset=utf-8")
    assert "".join(one["text_output"] for one in events(body)) == choice["text"]
    assert [one["finish_reason"] for one in events(body)][-1] == "length"
    assert len(events(body)) > 1
    _, _, body = post(cluster, f"{path}/generate_stream", flat)
    assert events(body) == [{**named, "text_output": choice["text"]}]


BAD_GENERATE: list[tuple[Any, int, str]] = [
    (b"{", 400, "body"),
    (b"[]", 400, "body"),
    ({}, 400, "text_input"),
    ({"text_input": 3}, 400, "text_input"),
    ({"text_input": ["a"]}, 400, "text_input"),
    ({"text_input": "a", "image": "b"}, 400, "image"),
    ({"text_input": "a", "parameters": {"nothing": 1}}, 400, "nothing"),
    ({"text_input": "a", "parameters": {"text_input": "b"}}, 400, "text_input"),
    ({"text_input": "a", "parameters": 3}, 400, "parameters"),
    ({"text_input": "a", "seed": 1, "parameters": {"seed": 2}}, 400, "seed"),
    ({"text_input": "a", "sampling_parameters": "[1]"}, 400, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": '{"stream": true}'}, 400, "stream"),
    ({"text_input": "a", "temperature": "hot"}, 400, "temperature"),
    ({"text_input": "a", "temperature": "1e"}, 400, "temperature"),
    ({"text_input": "a", "max_tokens": "1.5"}, 400, "max_tokens"),
    ({"text_input": "a", "stop": [""]}, 400, "stop"),
    ({"text_input": "a", "stop": ["x"] * 17}, 400, "stop"),
    ({"text_input": "a", "priority": -1}, 400, "priority"),
    ({"text_input": "a", "timeout": 5, "deadline_s": 1.0}, 400, "timeout"),
    ({"text_input": "a", "timeout": 1 << 40}, 400, "timeout"),
    ({"text_input": "a", "stream": True}, 400, "stream"),
    ({"text_input": "a", "slo_class": "nobody"}, 400, "slo_class"),
    ({"text_input": "a", "structured_outputs": {"json": {"type": "string", "format": "path"}}}, 400, "structured_outputs.json"),
    ({"text_input": "a" * (9 << 20)}, 413, "body"),
]


def test_a_bad_object_is_refused_in_the_protocols_form(cluster: ProcessCluster) -> None:
    for body, status, field in BAD_GENERATE:
        got, media, answer = post(cluster, f"/v2/models/{MODEL}/generate", body)
        told = json.loads(answer)
        assert (got, media, told["param"]) == (status, "application/json", field), (str(body)[:80], told)
        assert field in told["error"]
    got, _, answer = post(cluster, "/v2/models/other/generate_stream", {"text_input": "a"})
    assert (got, json.loads(answer)["code"]) == (404, "unknown_model")
    got, _, answer = post(cluster, "/v2/nothing", {})
    assert (got, json.loads(answer)["code"]) == (404, "not_found")


def test_a_client_that_leaves_frees_what_its_requests_hold(cluster: ProcessCluster, hold: Hold) -> None:
    """It leaves by HTTP in the middle of a stream, and by gRPC in the middle of an answer and of a stream."""
    fields = {"max_tokens": LONG_OUTPUT, "ignore_eos": True}
    with hold.at(HELD):
        body = {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(fields)}
        raw = RawHttp(cluster.http, f"/v2/models/{MODEL}/generate_stream", body)
        raw.read_until(b'"text_output"')
        wait_holding(cluster)
        raw.close()
        wait_left(cluster)
    cluster.assert_empty()
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with hold.at(HELD):
            whole = stub.ModelInfer.future(infer_request("left-whole", fields), timeout=BOUND_S)
            wait_holding(cluster)
            whole.cancel()
            wait_left(cluster)
        cluster.assert_empty()
        with hold.at(HELD):
            call = stub.ModelStreamInfer(
                iter([infer_request("left-first", fields), infer_request("left-second", fields)]), timeout=BOUND_S
            )
            cluster.wait_state(lambda state: state.running_requests == 2, BOUND_S)
            call.cancel()
            wait_left(cluster)
        cluster.assert_empty()
    assert all(" outcome=cancelled " in ended(cluster, f"left-{name}") for name in ("whole", "first", "second"))


def wait_left(cluster: ProcessCluster) -> None:
    """Until the router has noticed that the client has left."""
    cluster.wait_state(lambda state: state.running_requests + state.queued_requests == 0, BOUND_S)


def infer_request(name: str, fields: dict[str, Any]) -> pb.ModelInferRequest:
    """A request as a message, whose prompt stands in the typed contents."""
    message = pb.ModelInferRequest(model_name=MODEL, id=name)
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PROMPT.encode())
    for field, value in fields.items():
        message.parameters[field].MergeFrom(
            pb.InferParameter(bool_param=value) if isinstance(value, bool) else pb.InferParameter(int64_param=value)
        )
    return message


def test_requests_are_counted_and_end_at_their_deadlines(cluster: ProcessCluster, hold: Hold) -> None:
    """`timeout` is Triton's name of the deadline, in microseconds."""
    before = {outcome: counted(cluster, outcome) for outcome in ("deadline_exceeded", "length")}
    with hold.at(HELD):
        body = {"text_input": PROMPT, "max_tokens": LONG_OUTPUT, "ignore_eos": True, "timeout": 500_000}
        status, _, answer = post(cluster, f"/v2/models/{MODEL}/generate", body)
        assert (status, json.loads(answer)["code"]) == (504, "deadline_exceeded")
    status, _, _ = post(cluster, f"/v2/models/{MODEL}/generate", {"text_input": PROMPT, "max_tokens": 1, "ignore_eos": True})
    assert status == 200
    for outcome, count in before.items():  # a page is up to a second old
        cluster.wait_state(lambda _, outcome=outcome, count=count: counted(cluster, outcome) == count + 1, BOUND_S)
    cluster.assert_empty()


def counted(cluster: ProcessCluster, outcome: str) -> int:
    """The requests that ended so, as the metrics page has them."""
    with urllib.request.urlopen(f"http://{cluster.http}/metrics", timeout=BOUND_S) as answer:
        page = answer.read().decode()
    found = re.search(rf'^pdserve_requests_total{{outcome="{outcome}"}} ([0-9.e+]+)$', page, re.MULTILINE)
    return int(float(found[1])) if found else 0
