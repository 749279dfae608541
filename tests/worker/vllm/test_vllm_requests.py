"""What is sent to vLLM, and how its answers are read: those that a real server gave, and those that it should never give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import ClusterConfig, EngineConfig, PoolConfig, VllmConfig, WorkerConfig
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError, ReplicaLost
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.worker.messages import EngineKv
from pdserve.worker.vllm.metrics import read_labels, read_load
from pdserve.worker.vllm.requests import (
    BadAnswer,
    decode_body,
    discard_body,
    prefill_body,
    read_chunk,
    read_hits,
    read_kv,
    seed_after,
)
from pdserve.worker.vllm.server import check_settings

RECORDED = Path(__file__).parent / "recorded"
BLOCK = 128


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


def events(name: str) -> list[Any]:
    lines = recorded(name)["reply"].splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def spec_of(prompt: tuple[int, ...] = (5, 6, 7), constraint: Constraint | None = None, **params: Any) -> RequestSpec:
    return RequestSpec(prompt, SamplingParams(**{"temperature": 0.0, **params}), constraint=constraint)


def test_a_recorded_prefill_gives_a_token_and_a_ticket():
    answer = json.loads(recorded("generate_prefill")["reply"])
    assert read_chunk(answer, top=None) == ((37,), FinishReason.LENGTH, ())
    kv = read_kv(answer, 150, BLOCK)
    assert kv.num_blocks == 2
    assert json.loads(kv.params) == answer["kv_transfer_params"]


def test_a_recorded_stream_gives_tokens_with_log_probabilities():
    chunks = [chunk for event in events("generate_decode") if (chunk := read_chunk(event, top=1)) is not None]
    assert [chunk.token_ids for chunk in chunks] == [(415,), (58,), (319,), (270,)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, FinishReason.LENGTH]
    assert chunks[0].logprobs[0].top == ((415, -1.759820580482483),)
    assert chunks[0].logprobs[0].logprob == -1.759820580482483


def test_recorded_errors_are_told_apart():
    with pytest.raises(InvalidRequest, match="longer than the maximum model length"):
        read_chunk(events("generate_error_prompt_too_long")[0], top=None)
    with pytest.raises(ReplicaLost, match="Internal server error"):
        read_chunk(events("generate_dead_peer_stream")[0], top=None)


def test_a_request_of_ours_has_the_form_of_the_recorded_ones():
    sent = recorded("generate_prefill")["body"]
    ours = prefill_body(spec_of(tuple(sent["token_ids"]), max_tokens=4), (), ())
    assert ours["token_ids"] == sent["token_ids"]
    assert ours["kv_transfer_params"] == sent["kv_transfer_params"]
    assert ours["sampling_params"].items() >= sent["sampling_params"].items()
    sent = recorded("generate_decode")["body"]
    kv = EngineKv(2, json.dumps(sent["kv_transfer_params"]).encode())
    ours = decode_body(spec_of(tuple(sent["token_ids"][:-1]), max_tokens=5, logprobs=1), (37,), (), kv, BLOCK)
    assert ours["token_ids"] == sent["token_ids"]
    assert ours["kv_transfer_params"] == sent["kv_transfer_params"]
    assert ours["sampling_params"].items() >= sent["sampling_params"].items()


@pytest.mark.parametrize(("length", "blocks"), [(127, 1), (128, 2), (129, 2), (256, 3)])
def test_a_full_last_block_is_followed_by_one_that_the_reader_writes_first(length: int, blocks: int):
    lent = -(-length // BLOCK)
    kv = EngineKv(lent, json.dumps({"remote_block_ids": [list(range(1, lent + 1))]}).encode())
    body = decode_body(spec_of(tuple(range(length)), max_tokens=4), (3,), (), kv, BLOCK)
    assert len(body["kv_transfer_params"]["remote_block_ids"][0]) == blocks
    body = discard_body(tuple(range(length)), kv, BLOCK)
    assert len(body["kv_transfer_params"]["remote_block_ids"][0]) == blocks
    assert len(body["token_ids"]) == length + 1


def test_what_a_client_has_counts():
    params = decode_body(spec_of(max_tokens=9, min_tokens=5, seed=3, temperature=1.0), (8, 9), (2,), None, BLOCK)[
        "sampling_params"
    ]
    assert (params["max_tokens"], params["min_tokens"], params["stop_token_ids"]) == (7, 3, [2])
    assert params["seed"] == seed_after(3, 2) != seed_after(3, 1)
    assert prefill_body(spec_of(max_tokens=9, min_tokens=5), (), ())["sampling_params"]["min_tokens"] == 1
    assert "kv_transfer_params" not in prefill_body(spec_of(max_tokens=1), (), ()), "nobody would fetch it"
    assert decode_body(spec_of(ignore_eos=True, stop_token_ids=(4,)), (), (2,), None, BLOCK)["sampling_params"][
        "stop_token_ids"
    ] == [4]


def test_grammars_go_to_vllm_as_they_are_and_only_from_the_start():
    schema = spec_of(constraint=Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}'))
    assert decode_body(schema, (), (), None, BLOCK)["sampling_params"]["structured_outputs"] == {"json": '{"type": "object"}'}
    with pytest.raises(ReplicaLost, match="structured_outputs"):
        decode_body(schema, (4,), (), None, BLOCK)
    with pytest.raises(InvalidRequest, match="Lark"):
        decode_body(spec_of(constraint=Constraint(ConstraintKind.LARK, 'start: "a"')), (), (), None, BLOCK)


GOOD = json.loads(recorded("generate_prefill")["reply"])


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": [[2]]},
        {"remote_block_ids": []},
        {"remote_block_ids": None},
        {"remote_num_tokens": 149},
        {"do_remote_prefill": False},
        {"remote_engine_id": None},
        {"remote_host": ""},
        {"padding": "x" * (1 << 19)},
    ],
)
def test_a_ticket_that_is_not_of_this_prompt_is_none(changes: dict[str, Any]):
    answer = {**GOOD, "kv_transfer_params": {**GOOD["kv_transfer_params"], **changes}}
    with pytest.raises(BadAnswer):
        read_kv(answer, 150, BLOCK)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "error", "token_ids", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
CHOICE = st.fixed_dictionaries({"finish_reason": JSON, "token_ids": JSON, "logprobs": JSON})


@given(JSON | st.fixed_dictionaries({"choices": st.lists(CHOICE, max_size=2)}), st.none() | st.integers(0, 3))
def test_nonsense_is_a_typed_error(answer: Any, top: int | None):
    try:
        chunk = read_chunk(answer, top=top)
    except PdserveError:
        return
    assert chunk is None or all(type(token_id) is int and token_id >= 0 for token_id in chunk.token_ids)


@pytest.mark.parametrize("top", [{"token_id": "x"}, {"token_id": -1}, {"token_id": None}, {"rank": None}, {"logprob": 10**400}])
def test_log_probabilities_that_cannot_be_are_a_bad_answer(top: dict[str, Any]):
    one = {"logprob": -0.5, "top_logprobs": [{"token_id": 4, "rank": 1, "logprob": -0.5, **top}]}
    answer = {"choices": [{"finish_reason": None, "token_ids": [4], "logprobs": {"content": [one]}}]}
    with pytest.raises(BadAnswer):
        read_chunk(answer, top=1)


@pytest.mark.parametrize(("name", "usage"), [("decode", 0.0), ("prefill_idle", 0.0), ("prefill_holding", None)])
def test_recorded_pages_tell_the_load(name: str, usage: float | None):
    page = (RECORDED / f"metrics_{name}.txt").read_text()
    load = read_load(page)
    assert load.waiting == 0
    assert load.kv_usage == usage if usage is not None else load.kv_usage > 0
    assert read_labels(page, "vllm:cache_config_info").items() >= {"block_size": "128", "num_gpu_blocks": "8192"}.items()


@pytest.mark.parametrize("value", ["-1.0", "2.0", "nan", "inf", "x"])
def test_a_load_that_cannot_be_is_refused(value: str):
    page = f"vllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc {value}\n"
    with pytest.raises(ValueError, match=r"kv_cache_usage_perc|could not convert"):
        read_load(page)
    with pytest.raises(ValueError, match="lacks"):
        read_load("")
    with pytest.raises(KeyError):
        read_labels("", "vllm:cache_config_info")


def test_settings_that_make_no_sense_with_another_engine_are_refused():
    foreign = EngineConfig(backend="vllm")
    with pytest.raises(ConfigError, match="openengine_port"):
        WorkerConfig("w", "host:1", foreign, openengine_port=0)
    with pytest.raises(ConfigError, match=r"prefill\.openengine_port"):
        ClusterConfig(engine=foreign, prefill=PoolConfig(openengine_port=0))
    with pytest.raises(ConfigError, match=r"engine\.backend and decode\.engine\.backend differ"):
        ClusterConfig(prefill=PoolConfig(engine={"backend": "vllm"}))
    with pytest.raises(ConfigError, match="one server"):
        ClusterConfig(engine=foreign, decode=PoolConfig(replicas=2, engine={"vllm": {"url": "http://127.0.0.1:1"}}))
    both = EngineConfig(backend="vllm", vllm=VllmConfig(url="http://127.0.0.1:1"))
    one = PoolConfig(max_replicas=1)
    with pytest.raises(ConfigError, match=r"in both pools, .* decode\.engine\.vllm\.url, or set prefill\.replicas to 0"):
        ClusterConfig(engine=both, prefill=one, decode=one)
    ClusterConfig(engine=both, prefill=PoolConfig(replicas=0), decode=one)
    ClusterConfig(engine=both, prefill=one, decode=PoolConfig(max_replicas=1, engine={"vllm": {"url": "http://127.0.0.1:2"}}))
    with pytest.raises(ConfigError, match="for the backend vllm"):
        EngineConfig(vllm=VllmConfig(url="http://127.0.0.1:1"))
    for changes in ({"url": "ftp://x:1"}, {"url": "http://127.0.0.1"}, {"url": "http://127.0.0.1:1", "args": ("-x",)}):
        with pytest.raises(ConfigError, match="url"):
            VllmConfig(**changes)
    for name, value in {
        "quantization": "int8",
        "batch_invariant": True,
        "kv_cache_dtype": "fp32",
        "model_family": "a:b",
    }.items():
        with pytest.raises(ConfigError, match=name):
            check_settings(EngineConfig(backend="vllm", **{name: value}))


@pytest.mark.parametrize(("said", "blocks"), [(0, 0), (None, 0), (127, 0), (256, 2), ("x", 0), (-5, 0), (384, 2), (10**30, 2)])
def test_what_the_lender_had_already_is_counted_in_blocks(said: Any, blocks: int):
    answer = {"kv_transfer_params": {**GOOD["kv_transfer_params"], "remote_prefill_cached_tokens": said}}
    assert read_hits(answer, 384, BLOCK) == blocks
