"""OpenEngine at real workers: a caller that is no router of ours gets the tokens that the router's clients get, and whatever
goes wrong is told with a type and leaves nothing behind."""

from __future__ import annotations

import base64
import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from real_service import BOUND_S, LONG_OUTPUT, LONG_PROMPT, QUICK_BEATS, tiny

from pdserve.config import WorkerConfig
from pdserve.rpc.v1 import openengine_pb2, openengine_pb2_grpc
from testkit.client import generate_all, request
from testkit.processes import Process, ProcessCluster

pytestmark = pytest.mark.cluster

PROMPT = [i * 7 % 250 for i in range(100)]
FINISHED = 400
"""An output that runs while something else happens, and is read to its end."""
CODE = grpc.StatusCode
Session = openengine_pb2.KvSessionRef
Response = openengine_pb2.GenerateResponse


class Worker:
    """The port of one worker, as a control plane sees it."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.inference: Any = openengine_pb2_grpc.InferenceStub(self.channel)
        self.control: Any = openengine_pb2_grpc.ControlStub(self.channel)

    def run(self, message: Any, metadata: tuple[tuple[str, str], ...] = ()) -> list[Response]:
        return list(self.inference.Generate(message, timeout=BOUND_S, metadata=metadata))

    def refused(self, message: Any, metadata: tuple[tuple[str, str], ...] = ()) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self.run(message, metadata)
        return caught.value.code(), caught.value.details() or ""

    def session(self, message: Any) -> Session:
        """Run a prefill phase."""
        *_, last = self.run(message)
        return last.prefill_ready.kv_session


@dataclasses.dataclass
class Pair:
    """A prefill and a decode worker. Leave it to check that nothing is left on them."""

    prefill: Worker
    decode: Worker

    def both(self, message: Any) -> list[Response]:
        """Run a request in two phases, and return the answer of the second."""
        return self.decode.run(under(message, self.prefill.session(message)))


@contextmanager
def pair_of(addresses: tuple[str, str]) -> Iterator[Pair]:
    workers = [Worker(one) for one in addresses]
    try:
        yield Pair(*workers)
    finally:
        for worker in workers:
            worker.channel.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """With prefix caching off, so that each handoff reads all blocks."""
    with ProcessCluster(tiny(), prefill=1, decode=1, worker={"openengine_port": 0, **QUICK_BEATS}) as running:
        yield running
        running.assert_empty()
        for name in running.worker_names:  # gRPC logs one for a status that comes while a message is under way
            assert "Traceback" not in running.processes[name].log()


def ports(cluster: ProcessCluster) -> tuple[str, str]:
    return tuple(str(cluster.processes[name].ready["openengine"]) for name in ("prefill-0", "decode-0"))  # type: ignore[return-value]


@pytest.fixture
def pair(cluster: ProcessCluster) -> Iterator[Pair]:
    with pair_of(ports(cluster)) as made:
        yield made
    cluster.assert_empty()


@contextmanager
def without_router(folder: Path) -> Iterator[tuple[Process, Process]]:
    """Two workers that nobody but us can give a request."""
    processes: list[Process] = []
    try:
        for role in ("prefill", "decode"):
            config = WorkerConfig(f"{role}-0", "", tiny(), openengine_port=0, heartbeat_interval_s=0.05)
            processes.append(Process(f"{role}_worker", config, folder, role))
        for process in processes:
            process.wait_ready()
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.stop()


def asked(ids: list[int] = PROMPT, *, request_id: str = "", **fields: dict[str, Any]) -> openengine_pb2.GenerateRequest:
    """Return a request. Each field is a message by its JSON names; greedy unless `sampling` is there."""
    stopping = {"max_tokens": 24, "ignore_eos": True} | fields.pop("stopping", {})
    body = {
        "request_id": request_id,
        "token_ids": {"ids": ids},
        "sampling": {"temperature": 0.0},
        "stopping": stopping,
        **fields,
    }
    return ParseDict(body, openengine_pb2.GenerateRequest())


def under(message: openengine_pb2.GenerateRequest, session: Session) -> openengine_pb2.GenerateRequest:
    """Return the request of the decode phase."""
    made = openengine_pb2.GenerateRequest()
    made.CopyFrom(message)
    made.kv.session.CopyFrom(session)
    return made


def ids_of(answer: list[Response]) -> list[int]:
    return [info.token_id for one in answer for info in one.token.tokens]


def text_of(answer: list[Response]) -> str:
    return "".join(one.token.text for one in answer)


SEEDED: dict[str, Any] = {"temperature": 0.75, "top_k": 40, "top_p": 0.875, "min_p": 0.03125, "seed": "5"}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {**SEEDED, "repetition_penalty": 1.25}], ids=["greedy", "seeded"])
def test_the_tokens_are_those_of_the_router(cluster: ProcessCluster, pair: Pair, sampling: dict[str, Any]) -> None:
    """(1) Our own client asks the router. (2) A foreign one asks the decode worker alone, and (3) both workers in two phases,
    while (4) clients of the router use the same workers."""
    ours: dict[str, Any] = {name: int(value) if name == "seed" else value for name, value in sampling.items()}
    (want, *_) = generate_all(cluster.grpc, [request(PROMPT, max_tokens=24, ignore_eos=True, **ours)])
    message = asked(sampling=sampling)
    alone = pair.decode.run(message)
    assert ids_of(alone) == want.ids
    assert text_of(alone) == want.text
    others = [request([3, 4, i], max_tokens=40, ignore_eos=True, temperature=0.0) for i in range(4)]
    handed = pair.both(message)
    generate_all(cluster.grpc, others)
    assert ids_of(handed) == want.ids
    assert text_of(handed) == want.text
    last = handed[-1]
    assert last.finished.reason == openengine_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 24)
    assert all(one.token.HasField("output_index") for one in handed if one.HasField("token"))
    assert not any(one.HasField("usage") for one in handed[:-1])


def shape(answer: list[Response]) -> list[dict[str, Any]]:
    """Return what must be equal however a request was computed."""
    made = [MessageToDict(one, preserving_proto_field_name=True) for one in answer]
    for one in made:
        one.get("usage", {}).pop("cached_prompt_tokens", None)
        del one["request_id"]
    return made


def spelled(pair: Pair, count: int) -> tuple[list[int], str]:
    """Return the first tokens of the usual answer, and their text."""
    answer = pair.decode.run(asked(stopping={"max_tokens": count}))
    return ids_of(answer), text_of(answer)


@pytest.mark.parametrize(
    "case", ["one token", "stop text", "stop id first", "stop id kept", "eos", "logprobs", "choice", "regex", "salt", "text"]
)
def test_both_ways_of_computing_give_one_answer(pair: Pair, case: str) -> None:
    """What ends at token 0, what the lender alone knows of it, and what changes its name."""
    first, text = spelled(pair, 3)
    fields: dict[str, Any] = {
        "one token": {"stopping": {"max_tokens": 1}},
        "stop text": {"stopping": {"conditions": [{"stop_text": text[:1]}]}},
        "stop id first": {"stopping": {"conditions": [{"stop_token_id": first[0]}]}},
        "stop id kept": {"stopping": {"conditions": [{"stop_token_id": first[1]}], "include_stop_in_output": True}},
        "eos": {"stopping": {"ignore_eos": False}, "sampling": {"temperature": 2.0, "seed": "3"}},
        "logprobs": {"response": {"return_output_logprobs": True, "output_candidates": {"top_n": 3}}},
        "choice": {"guided": {"choice": {"choices": ["a", "b"]}}},
        "regex": {"guided": {"regex": "[0-9]{5}"}, "sampling": SEEDED},
        "salt": {"kv": {"cache_salt": "a tenant"}},
        "text": {},
    }[case]
    message = asked(**fields)
    if case == "text":
        message.prompt = "The sky is blue and the grass is green. " * 6
    alone, handed = pair.decode.run(message), pair.both(message)
    assert shape(alone) == shape(handed)
    last = alone[-1].finished
    if case.startswith("stop"):
        assert last.reason == openengine_pb2.FINISH_REASON_STOP
        assert last.HasField("stop_match")
    if case == "stop text":
        assert last.stop_match.stop_text == text[:1]
        assert text_of(alone) == ""
    if case == "stop id first":
        assert (ids_of(alone), alone[-1].usage.completion_tokens) == ([], 1)
    if case == "stop id kept":
        assert ids_of(alone) == first[:2]
    if case == "logprobs":
        infos = [info for one in handed for info in one.token.tokens]
        assert all(info.logprob <= 0 and len(info.candidates) == 3 for info in infos)
        assert all(info.token_id == info.candidates[0].token_id for info in infos), "greedy"
    if case == "choice":
        assert text_of(alone) in "ab"


def test_a_phase_with_other_limits_decides_nothing_of_the_other(pair: Pair) -> None:
    """Control planes ask the prefill phase for one token. Each end by its limits belongs to the decode phase."""
    want = ids_of(pair.decode.run(asked()))
    stopped = [{"stop_token_id": want[0]}]
    for stopping in ({"max_tokens": 1}, {"max_tokens": 1, "min_tokens": 1}, {"conditions": stopped}):
        session = pair.prefill.session(asked(stopping=stopping))
        assert ids_of(pair.decode.run(under(asked(), session))) == want
    session = pair.prefill.session(asked())
    ended = pair.decode.run(under(asked(stopping={"conditions": stopped}), session))
    assert [one.WhichOneof("event") for one in ended] == ["token", "finished"] or ids_of(ended) == []
    assert ended[-1].finished.stop_match.stop_token_id == want[0]


def test_the_prompt_is_told_where_it_is_computed(pair: Pair) -> None:
    response = {"return_prompt_logprobs": True, "prompt_candidates": {"top_n": 2}}
    alone, lent = pair.decode.run(asked(response=response)), pair.prefill.run(asked(response=response))
    assert alone[0].prompt == lent[0].prompt
    tokens = alone[0].prompt.tokens
    assert [info.token_id for info in tokens] == PROMPT
    assert not tokens[0].HasField("logprob")
    assert all(info.HasField("logprob") and len(info.candidates) == 2 for info in tokens[1:])
    assert [one.WhichOneof("event") for one in lent] == ["prompt", "prefill_ready"]
    code, why = pair.decode.refused(under(asked(response=response), lent[-1].prefill_ready.kv_session))
    assert (code, "response.return_prompt_logprobs" in why) == (CODE.INVALID_ARGUMENT, True)
    pair.decode.run(under(asked(), lent[-1].prefill_ready.kv_session))


def errors(answer: list[Response]) -> openengine_pb2.EngineError:
    """Return the one error of an answer, which is its only event."""
    (one,) = answer
    assert one.HasField("usage")
    return one.error


def test_a_session_serves_one_request_of_its_prompt(pair: Pair) -> None:
    """(1) Another prompt, salt or constraint is refused and costs nothing. (2) The right one is served, (3) once."""
    session = pair.prefill.session(asked())
    for other in (asked([1, *PROMPT[1:]]), asked(kv={"cache_salt": "other"}), asked(guided={"choice": {"choices": ["a"]}})):
        code, why = pair.decode.refused(under(other, session))
        assert code is CODE.INVALID_ARGUMENT
        assert why == "kv.session: is over another prompt, kv.cache_salt or guided"
    assert len(ids_of(pair.decode.run(under(asked(), session)))) == 24
    error = errors(pair.decode.run(under(asked(), session)))
    assert (error.code, error.retryable) == (openengine_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, False)


def test_a_session_that_nobody_wants_is_ended_by_its_name(pair: Pair) -> None:
    session = pair.prefill.session(asked())
    abort = openengine_pb2.AbortRequest(kv_session=session)
    assert pair.prefill.control.GetLoad(openengine_pb2.GetLoadRequest()).active_kv_sessions == 1
    assert pair.prefill.control.Abort(abort).status == openengine_pb2.ABORT_STATUS_ABORTED
    assert pair.prefill.control.Abort(abort).status == openengine_pb2.ABORT_STATUS_ALREADY_FINISHED
    error = errors(pair.decode.run(under(asked(), session)))
    assert error.code == openengine_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND


def changed(session: Session, field: str, value: Any) -> Session:
    made = Session()
    made.CopyFrom(session)
    if field == "pdserve":
        made.attributes_struct[field] = value
    else:
        setattr(made, field, value)
    return made


def test_a_session_that_no_worker_made_is_refused_by_its_field(pair: Pair) -> None:
    session = pair.prefill.session(asked())
    opaque = bytearray(base64.b64decode(session.attributes_struct["pdserve"]))
    flipped = [opaque[:at] + bytes([opaque[at] ^ 1]) + opaque[at + 1 :] for at in (0, 31, 32, 40, len(opaque) - 1)]
    wrong = {
        "kv.session.transfer_backend": [changed(session, "transfer_backend", "mooncake")],
        "kv.session.dp_rank": [changed(session, "dp_rank", 1)],
        "kv.session.session_id": [changed(session, "session_id", "0000000000000000.1")],
        "kv.session.attributes_struct.pdserve": [
            Session(transfer_backend=session.transfer_backend),
            changed(session, "pdserve", "no base64!"),
            changed(session, "pdserve", 7.0),
            changed(session, "pdserve", "A" * (3 << 20)),
        ],
        "kv.session: was not made": [
            changed(session, "pdserve", ""),
            changed(session, "pdserve", base64.b64encode(bytes(100)).decode()),
            *(changed(session, "pdserve", base64.b64encode(one).decode()) for one in flipped),
        ],
    }
    for named, sessions in wrong.items():
        for one in sessions:
            code, why = pair.decode.refused(under(asked(), one))
            assert code is CODE.INVALID_ARGUMENT, why
            assert why.startswith(named)
    code, why = pair.prefill.refused(under(asked(), session))
    assert (code, why.startswith("kv.session: this is a prefill worker")) == (CODE.INVALID_ARGUMENT, True)
    assert len(ids_of(pair.decode.run(under(asked(), session)))) == 24, "none of them cost the session"


@pytest.mark.slow
def test_a_lender_that_dies_between_the_phases_is_told(cluster: ProcessCluster) -> None:
    with pair_of(ports(cluster)) as pair:
        session = pair.prefill.session(asked())
        cluster.processes["prefill-0"].kill()
        error = errors(pair.decode.run(under(asked(), session)))
        assert (error.code, error.retryable) == (openengine_pb2.ERROR_CODE_KV_TRANSFER_FAILED, False)
        assert len(ids_of(pair.decode.run(asked()))) == 24, "the decode worker serves on"
    cluster.start("prefill-0")
    cluster.heal()
    with pair_of(ports(cluster)) as pair:
        assert len(ids_of(pair.both(asked()))) == 24
        error = errors(pair.decode.run(under(asked(), session)))
        assert error.code in (openengine_pb2.ERROR_CODE_KV_TRANSFER_FAILED, openengine_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND)
    cluster.assert_empty()


def ending(call: Any) -> tuple[grpc.StatusCode, list[Response]]:
    """Read a call to its end, good or bad."""
    answer = []
    try:
        for one in call:
            answer.append(one)  # noqa: PERF402 - what came before an error counts
    except grpc.RpcError as exc:
        return exc.code(), answer
    return CODE.OK, answer


def long_one(tokens: int = LONG_OUTPUT, **fields: Any) -> openengine_pb2.GenerateRequest:
    return asked([1, 2, 3], stopping={"max_tokens": tokens}, **fields)


@pytest.mark.parametrize("how", ["cancel", "deadline", "id", "all", "channel"])
def test_a_request_that_its_caller_gives_up_leaves_nothing(pair: Pair, how: str) -> None:
    """In the middle of its output. The fixture then checks that both workers are empty."""
    worker = pair.decode
    call = worker.inference.Generate(long_one(request_id="r"), timeout=1.0 if how == "deadline" else BOUND_S)
    if how != "deadline":  # it may pass before a token comes
        next(call)
    if how == "cancel":
        call.cancel()
    elif how == "channel":
        worker.channel.close()
    elif how in ("id", "all"):
        target = {"request_id": "r"} if how == "id" else {"all_requests": {}}
        abort = ParseDict(target, openengine_pb2.AbortRequest())
        assert worker.control.Abort(abort).status == openengine_pb2.ABORT_STATUS_ABORTED
        *_, last = call
        assert last.finished.reason == openengine_pb2.FINISH_REASON_CANCELLED
        assert 1 <= last.usage.completion_tokens < LONG_OUTPUT
        again = openengine_pb2.AbortRequest(request_id="r")
        assert worker.control.Abort(again).status == openengine_pb2.ABORT_STATUS_ALREADY_FINISHED
        return
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() in (CODE.CANCELLED, CODE.DEADLINE_EXCEEDED)


def test_a_prefill_that_its_caller_gives_up_leaves_nothing(pair: Pair) -> None:
    """Twenty prompts of many steps at once; half of them are cancelled, the others are aborted."""
    calls = [pair.prefill.inference.Generate(asked(LONG_PROMPT, request_id=f"p{i}"), timeout=BOUND_S) for i in range(20)]
    calls[0].initial_metadata()  # its blocks are lent
    for call in calls[::2]:
        call.cancel()
    everything = openengine_pb2.AbortRequest(all_requests=openengine_pb2.AllRequests())
    pair.prefill.control.Abort(everything)
    for call in calls[1::2]:
        code, answer = ending(call)
        ends = {one.error.code for one in answer if one.HasField("error")}
        assert ends <= {openengine_pb2.ERROR_CODE_CANCELLED}
        assert code in (CODE.OK, CODE.CANCELLED)  # it had no blocks yet
    pair.prefill.control.Abort(everything)  # sessions of those that came after the first one


def test_what_cannot_be_served_is_refused_by_its_name(pair: Pair) -> None:
    refused: dict[str, Any] = {
        "sampling.temperature": {"sampling": {"temperature": 9.0}},
        "sampling.num_sequences": {"sampling": {"num_sequences": 2}},
        "sampling.top_k": {"sampling": {"top_k": -2}},
        "stopping.max_tokens": {"stopping": {"max_tokens": 0}},
        "stopping.conditions": {"stopping": {"conditions": [{}]}},
        "response.output_candidates.all": {"response": {"return_output_logprobs": True, "output_candidates": {"all": {}}}},
        "response.output_candidates.top_n": {"response": {"return_output_logprobs": True, "output_candidates": {"top_n": 21}}},
        "response.prompt_candidates": {"response": {"prompt_candidates": {"top_n": 1}}},
        "response.prompt_logprob_start": {"response": {"prompt_logprob_start": 3}},
        "kv.bypass_prefix_cache": {"kv": {"bypass_prefix_cache": True}},
        "kv.cache_salt": {"kv": {"cache_salt": "s" * 200}},
        "guided.ebnf_grammar": {"guided": {"ebnf_grammar": "root ::= a"}},
        "guided.backend": {"guided": {"regex": "a", "backend": "xgrammar"}},
        "guided": {"guided": {"json_schema": "{"}},
        "media": {"media": [{"url": "http://x/y.png"}]},
        "lora_name": {"lora_name": "a"},
        "request_id": {"request_id": "r" * 300},
    }
    for worker in (pair.prefill, pair.decode):
        for name, fields in refused.items():
            code, why = worker.refused(asked(**fields))
            assert (code, why.split(":")[0]) == (CODE.INVALID_ARGUMENT, name), why
        assert worker.refused(asked([]))[1] == "token_ids: is empty"
        assert "token id 99999" in worker.refused(asked([99999]))[1]
        assert worker.refused(asked([1] * 5000))[0] is CODE.INVALID_ARGUMENT
        assert worker.refused(openengine_pb2.GenerateRequest())[1].startswith("input: is missing")
        other = asked()
        other.model = "another"
        assert worker.refused(other)[0] is CODE.NOT_FOUND
    code, why = pair.decode.refused(asked(stopping={"max_tokens": 5000}))
    assert (code, why.split(":")[0]) == (CODE.INVALID_ARGUMENT, "stopping.max_tokens")


def test_metadata_are_read_and_what_is_left_out_is_listed(pair: Pair) -> None:
    wrong = {
        "openengine-priority": ["", "1.5", "x", "101", str(1 << 40)],
        "openengine-target-dp-rank": ["1", "-1"],
        "openengine-routing-key": [""],
    }
    for name, values in wrong.items():
        for value in values:
            code, why = pair.decode.refused(asked(), ((name, value),))
            assert (code, why.split(":")[0]) == (CODE.INVALID_ARGUMENT, name)
    code, why = pair.decode.refused(asked(), (("openengine-priority", "1"), ("openengine-priority", "1")))
    assert (code, why) == (CODE.INVALID_ARGUMENT, "openengine-priority: must be given once")
    message = asked(extra={"knob": 1})
    message.MergeFromString(b"\xf8\x07\x01")  # field 127, of a later revision
    good = (
        ("openengine-priority", "-3"),
        ("openengine-target-dp-rank", "0"),
        ("openengine-routing-key", "k"),
        ("openengine-x", "1"),
    )
    call = pair.decode.inference.Generate(message, timeout=BOUND_S, metadata=good)
    assert dict(call.initial_metadata())["x-pdserve-ignored-fields"] == "openengine-x, extra.knob, 127"
    assert len(ids_of(list(call))) == 24


def test_a_message_that_is_none_and_an_id_that_runs_are_refused(pair: Pair) -> None:
    raw = pair.decode.channel.unary_stream("/openengine.v1.Inference/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        list(raw(b"\xff\xff\xff", timeout=BOUND_S))
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    call = pair.decode.inference.Generate(long_one(request_id="twice"), timeout=BOUND_S)
    next(call)
    assert pair.decode.refused(asked(request_id="twice"))[0] is CODE.ALREADY_EXISTS
    call.cancel()


def test_a_prompt_without_room_is_refused_before_it_is_accepted(cluster: ProcessCluster, pair: Pair) -> None:
    """The pool holds 1024 blocks; each of these wants 113 and some to grow."""
    calls = []
    codes = set()
    for i in range(12):
        calls.append(pair.decode.inference.Generate(asked(LONG_PROMPT, request_id=f"f{i}"), timeout=BOUND_S))
        try:
            calls[-1].initial_metadata()
        except grpc.RpcError as exc:
            codes.add(exc.code())
        if calls[-1].done():
            codes.add(calls[-1].code())
    codes.discard(CODE.OK)
    assert codes == {CODE.RESOURCE_EXHAUSTED}
    for call in calls:
        call.cancel()


def test_requests_of_this_port_outlive_the_router(cluster: ProcessCluster) -> None:
    """(1) A request of the router and one of ours run. (2) The router is killed: its request is dropped, ours goes on.
    (3) Both phases work without it. (4) A new router finds the workers empty."""
    with pair_of(ports(cluster)) as pair:
        call = pair.decode.inference.Generate(long_one(FINISHED), timeout=BOUND_S)
        next(call)
        cluster.processes["router"].kill()
        assert len(ids_of(pair.both(asked()))) == 24
        assert len(ids_of(list(call))) == FINISHED - 1
    cluster.heal()
    cluster.assert_empty()


def test_the_services_describe_themselves_to_a_stranger(pair: Pair) -> None:
    """A client that has nothing of ours reads the protocol from the server, and calls it."""
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(pair.decode.channel))
    service = pool.FindServiceByName("openengine.v1.Inference")
    method = service.methods_by_name["Generate"]
    kinds = [message_factory.GetMessageClass(one) for one in (method.input_type, method.output_type)]
    call = pair.decode.channel.unary_stream(
        "/openengine.v1.Inference/Generate", kinds[0].SerializeToString, kinds[1].FromString
    )
    answer = list(call(kinds[0].FromString(asked().SerializeToString()), timeout=BOUND_S))
    assert ids_of(answer) == ids_of(pair.decode.run(asked()))


def test_control_tells_the_worker(cluster: ProcessCluster, pair: Pair) -> None:
    state = cluster.state()
    hellos = {w.hello.role: w.hello for w in state.workers}
    for worker, number, role in ((pair.prefill, 1, "PREFILL"), (pair.decode, 2, "DECODE")):
        control, hello = worker.control, hellos[number]
        info = control.GetServerInfo(openengine_pb2.GetServerInfoRequest())
        assert info.engine_role == getattr(openengine_pb2, f"ENGINE_ROLE_{role}")
        assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
        assert info.instance_id == f"{hello.worker_id}-{hello.incarnation:016x}"
        assert (info.capacity.kv_block_size, info.capacity.total_kv_blocks) == (hello.block_size, hello.num_blocks)
        (name,) = info.supported_models
        model = control.GetModelInfo(openengine_pb2.GetModelInfoRequest(model=name))
        assert model.max_context_length == hello.max_model_len
        for wrong, code in (("", CODE.INVALID_ARGUMENT), ("other", CODE.NOT_FOUND)):
            with pytest.raises(grpc.RpcError) as caught:
                control.GetModelInfo(openengine_pb2.GetModelInfoRequest(model=wrong))
            assert caught.value.code() is code
        ready = openengine_pb2.HEALTH_STATE_READY
        probed = control.Health(
            openengine_pb2.HealthRequest(include_inference_probe=True, role=info.engine_role), timeout=BOUND_S
        )
        assert {one.name: one.state for one in probed.checks}["inference_probe"] == ready == probed.state
        other = control.Health(openengine_pb2.HealthRequest(role=openengine_pb2.ENGINE_ROLE_AGGREGATED))
        assert other.state == openengine_pb2.HEALTH_STATE_NOT_READY
        load = control.GetLoad(openengine_pb2.GetLoadRequest(include_per_rank=True))
        assert (load.total_kv_blocks, len(load.ranks)) == (hello.num_blocks, 1)
        served = health_pb2_grpc.HealthStub(worker.channel).Check(
            health_pb2.HealthCheckRequest(service="openengine.v1.Control")
        )
        assert served.status == health_pb2.HealthCheckResponse.SERVING
        for method, kind in (
            ("LoadLora", openengine_pb2.LoadLoraRequest),
            ("UnloadLora", openengine_pb2.UnloadLoraRequest),
            ("ListLoras", openengine_pb2.ListLorasRequest),
            ("GetKvEventSources", openengine_pb2.GetKvEventSourcesRequest),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                getattr(control, method)(kind())
            assert caught.value.code() is CODE.UNIMPLEMENTED
            assert method in (caught.value.details() or "")
        with pytest.raises(grpc.RpcError) as caught:
            list(control.SubscribeKvEvents(openengine_pb2.SubscribeKvEventsRequest()))
        assert caught.value.code() is CODE.UNIMPLEMENTED
        for target, code in (({}, CODE.INVALID_ARGUMENT), ({"request_id": "nobody"}, CODE.NOT_FOUND)):
            with pytest.raises(grpc.RpcError) as caught:
                control.Abort(openengine_pb2.AbortRequest(**target))
            assert caught.value.code() is code


def test_workers_without_a_router_serve_drain_and_end(tmp_path: Path) -> None:
    """(1) Two phases. (2) A lease that nobody takes expires, although no heartbeat goes out. (3) A drain refuses what is new,
    finishes what runs, and ends the process."""
    with without_router(tmp_path) as (lender, reader):
        with pair_of((str(lender.ready["openengine"]), str(reader.ready["openengine"]))) as pair:
            assert ids_of(pair.both(asked())) == ids_of(pair.decode.run(asked()))
            call = pair.decode.inference.Generate(long_one(FINISHED), timeout=BOUND_S)
            next(call)
            reader.send(signal.SIGTERM)
            draining = openengine_pb2.HEALTH_STATE_DRAINING
            while pair.decode.control.Health(openengine_pb2.HealthRequest()).state != draining:
                pass
            code, why = pair.decode.refused(asked())
            assert code is CODE.UNAVAILABLE, why
            assert len(ids_of(list(call))) == FINISHED - 1
        assert reader.popen.wait(BOUND_S) == 0
        assert lender.terminate(BOUND_S) == 0
