"""Reading settings: what is accepted, and what the message says when it is not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.scaling.limits import planner_settings
from pdserve.config import (
    ClusterConfig,
    EngineConfig,
    LeaseConfig,
    RouterConfig,
    RouterProcessConfig,
    WorkerConfig,
    dump,
    load,
)
from pdserve.core.errors import ConfigError
from pdserve.core.sampling import Placement
from pdserve.core.settings.constants import GONE, LeaseConstants, RouterConstants
from pdserve.core.settings.types import parse_bytes
from pdserve.core.slo import BUILT_IN, SloClass


def test_order_is_file_then_flags_then_set(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine: {block_size: 8, max_num_seqs: 8, threads: 8}\nrouter:\n")
    flags = {"engine.max_num_seqs": 9, "engine.threads": 9, "router.http_port": 0}
    config = load(ClusterConfig, file, ["engine.threads=10", "decode.replicas=3"], flags)
    assert (config.engine.block_size, config.engine.max_num_seqs, config.engine.threads) == (8, 9, 10)
    assert config.decode.replicas == 3
    assert config.router.http_port == 0


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(engine=EngineConfig(model="a: b # c", served_model_name="007")),
        RouterProcessConfig(cluster_token="1e3"),
        WorkerConfig(worker_id="w", router_address="127.0.0.1:1"),
    ],
)
def test_dump_reads_back_equal(config: object, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(dump(config))
    assert load(type(config), file) == config


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("router.max_connections=15", r"router\.max_connections must be a whole number \(at least 16\) or null, got 15"),
        ("router.admin_port=50051", r"router\.grpc_port and router\.admin_port are both 50051"),
        ("engine.blok_size=1", "unknown setting engine.blok_size; known here: .*block_size"),
        ("engine.block_size=0", r"engine\.block_size must be a whole number \(at least 1\), got 0"),
        (
            "engine.tensor_parallel_size=0",
            r"engine\.tensor_parallel_size must be a whole number \(at least 1 and at most 64\), got 0",
        ),
        ("decode.engine={pipeline_parallel_size: 9}", r"pipeline_parallel_size 9 are 9 ranks: gangs have at most 8"),
        ("engine.step_timeout_s=0", r"engine\.step_timeout_s must be a number \(over 0\), got 0"),
        ("engine.block_size=true", r"engine\.block_size must be a whole number \(at least 1\), got True"),
        ("engine.kv_cache_memory=3 parsecs", "engine.kv_cache_memory: '3 parsecs' is not a size"),
        ("engine.dtype=int3", "engine.dtype must be one of auto, bfloat16, float32, got 'int3'"),
        ("engine.quantization=int3", "engine.quantization must be one of int4, int8 or null"),
        ("engine.gpu_memory_utilization=2", r"engine\.gpu_memory_utilization must be a number \(over 0 and at most 1\)"),
        (
            "engine.kv_cache_memory=0",
            r"engine\.kv_cache_memory must be a size such as 256MiB .*\(at least 1\) of bytes or null",
        ),
        ("engine=3", "engine must be a section"),
        ("engine.model={", "--set engine.model: '{' is not valid YAML"),
        ("model", "--set takes NAME=VALUE"),
        ("=3", "--set takes NAME=VALUE"),
        ("address.x.y=1", "address must be text"),
        ("prefill.replicas=-1", r"prefill\.replicas must be a whole number \(at least 0\)"),
        ("prefill.max_restarts_per_hour=-1", r"prefill\.max_restarts_per_hour must be a whole number \(at least 0\)"),
        ("prefill.max_restarts=3", "prefill.max_restarts is gone; its successor is max_restarts_per_hour"),
        ("decode.labels={pool: a b}", "decode.labels.pool: 'a b' is not a label selector"),
        ("decode.labels={-pool: a}", "decode.labels.-pool: '-pool' is not the name of a label"),
        ("prefill.engine={block_size: 8}", "prefill.engine.block_size and decode.engine.block_size differ"),
        ("prefill.engine={dtipe: auto}", "unknown setting prefill.engine.dtipe"),
        ("decode.replicas=0", "decode.replicas must be at least 1"),
        ("decode.resources={big: many}", r"decode\.resources\.big must be a number \(over 0\)"),
        ("address=somewhere", "address must be local, auto or HOST:PORT"),
        ("router.http_port=70000", r"router\.http_port must be a whole number \(at least 0 and at most 65535\)"),
        ("router.placement=up", "router.placement must be one of auto, colocated, disaggregated"),
        ("router.drain_s=.nan", r"router\.drain_s must be a number \(at least 0\)"),
        ("transport=fake", "unknown setting transport"),
        ("router.slo_classes=3", "router.slo_classes must be a section"),
        ("router.slo_classes={chat: 3}", "router.slo_classes.chat must be a section"),
        (
            "router.slo_classes={chat: {ttft: 1}}",
            r"^unknown setting router\.slo_classes\.chat\.ttft; known here: client, .*ttft_s",
        ),
        ("router.slo_classes={chat: {name: c}}", r"unknown setting router\.slo_classes\.chat\.name"),
        (
            "router.slo_classes={chat: {ttft_s: 0}}",
            r"router\.slo_classes\.chat\.ttft_s must be a number \(over 0 and at most 86400\) or null, got 0",
        ),
        ("router.slo_classes={chat: {ttft_s: .inf}}", r"chat\.ttft_s must be .* at most 86400\) or null, got inf"),
        ("router.slo_classes={no: {priority: 1}}", r"router\.slo_classes: the name False is not text; write it in quotes"),
        ("router.slo_classes={mine: {priority: 101}}", r"slo_classes\.mine\.priority must be .*at most 100\), got 101"),
        ("router.slo_classes={mine: {queue_share: 1.5}}", r"slo_classes\.mine\.queue_share must be .*at most 1\), got 1.5"),
        ("router.slo_classes={a b: {}}", r"router\.slo_classes\.a b: 'a b' is not the name of a class"),
        ("router.slo_classes={mine: {client: 1}}", r"slo_classes\.mine\.client must be true or false, got 1"),
        (
            "router.slo_classes={mine: {num_speculative_tokens: 65}}",
            r"slo_classes\.mine\.num_speculative_tokens must be .*at most 64.*, got 65",
        ),
        (
            "engine.speculative_config={num_speculative_tokens: 4}",
            r"engine\.speculative_config\.num_speculative_tokens is ignored where method is none: set method too",
        ),
        ("engine.speculative_config={method: draft_model}", r"engine\.speculative_config\.model must be set for the method"),
        (
            "decode.engine={max_num_batched_tokens: 1, speculative_config: {method: suffix}}",
            r"decode\.engine\.max_num_batched_tokens must be at least 2 with speculative_config\.method suffix, got 1",
        ),
        ("router.slo_classes={mine: {max_deadline_s: 0}}", r"slo_classes\.mine\.max_deadline_s must be a number \(over 0"),
        (
            "router.fairness_key=cookie",
            "router.fairness_key must be address, connection, api_key, or header:NAME, got 'cookie'",
        ),
        ("router.fairness_key='header:a b'", "router.fairness_key must be .*header:NAME"),
        (
            "router.max_client_priority=101",
            r"router\.max_client_priority must be a whole number \(at least 0 and at most 100\)",
        ),
        ("router.client_queue_share=0", r"router\.client_queue_share must be a number \(over 0 and at most 1\)"),
        ("router.default_class=chatt", "router.default_class 'chatt' is none of default, voice, code, chat, batch"),
    ],
)
def test_wrong_settings_are_named_in_one_line(override: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names) as caught:
        load(ClusterConfig, None, [override])
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"- a", "must hold a mapping"), (b"a: [", "not valid YAML"), (b"\xff\xfe\xfd", "not valid YAML"), (b"z: 1", "setting z")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load(ClusterConfig, file)
    assert str(file) in caught.value.message
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load(ClusterConfig, tmp_path / "none.yaml")


def test_a_setting_without_a_default_must_be_set() -> None:
    with pytest.raises(ConfigError, match="router_address must be set"):
        load(WorkerConfig, None, ["worker_id=w"])


def test_set_changes_one_of_two_sections_that_an_alias_shares(tmp_path: Path) -> None:
    """PyYAML gives both sections the same object."""
    file = tmp_path / "c.yaml"
    file.write_text("prefill: &pool {replicas: 2, engine: {threads: 2}}\ndecode: *pool\n")
    config = load(ClusterConfig, file, ["decode.replicas=3", "decode.engine.threads=3"])
    assert (config.prefill.replicas, config.prefill.engine) == (2, {"threads": 2})
    assert (config.decode.replicas, config.decode.engine) == (3, {"threads": 3})


def test_sections_made_in_python_are_checked_too() -> None:
    assert isinstance(LeaseConfig(ttl_s=30).ttl_s, float)
    with pytest.raises(ConfigError, match=r"^lease\.ttl_s must be a number \(over 0\), got '30'$"):
        LeaseConfig(ttl_s="30")
    with pytest.raises(ConfigError, match=r"^block_size must be a whole number \(at least 1\), got '16'$"):
        EngineConfig(block_size="16")


def test_a_number_becomes_text_where_it_names_a_resource_or_a_label() -> None:
    pool = load(ClusterConfig, None, ["prefill={resources: {1: 2}, labels: {7: a}}"]).prefill
    assert (pool.resources, pool.labels) == ({"1": 2.0}, {"7": "a"})


@pytest.mark.parametrize("placement", Placement)
def test_every_placement_can_be_set(placement: Placement) -> None:
    assert load(ClusterConfig, None, [f"router.placement={placement.value}"]).router.placement == placement.value


@given(
    count=st.integers(0, 1 << 50),
    unit=st.sampled_from([("", 1), ("KiB", 1024), (" MiB", 1 << 20), ("gib", 1 << 30), ("GB", 10**9)]),
)
def test_sizes(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count}{unit[0]}") == int(float(count) * unit[1])


@pytest.mark.parametrize(("text", "size"), [("64MiB", 64 << 20), ("0", 0), ("0 MiB", 0)])
def test_the_index_may_be_given_a_size_with_a_unit_or_none(text: str, size: int) -> None:
    assert load(ClusterConfig, None, [f"router.prefix_index_bytes={text}"]).router.prefix_index_bytes == size


def test_large_bodies_have_room_for_the_largest_one() -> None:
    assert [RouterConfig(max_body_bytes=size).max_inflight_body_bytes >> 20 for size in (8 << 20, 65 << 20)] == [64, 65]


@pytest.mark.parametrize("name", sorted(GONE))
def test_a_setting_that_is_gone_is_refused_with_the_reason_why_nothing_need_be_done(name: str, tmp_path: Path) -> None:
    """Files for the version before name them. No such name is dumped, offered, or a setting of the class that has it."""
    *sections, leaf = name.split(".")
    file, text = tmp_path / "c.yaml", f"{leaf}: 1"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    file.write_text(text)
    said = re.escape(f"{name} is gone, and need not be replaced: {GONE[name]}")
    for path, overrides in ((file, []), (None, [f"{name}=1"])):
        with pytest.raises(ConfigError, match=said):
            planner_settings(load(ClusterConfig, path, overrides))
    assert leaf not in str(yaml.safe_load(dump(ClusterConfig())).get(sections[0]))
    with pytest.raises(ConfigError, match="known here") as caught:
        planner_settings(load(ClusterConfig, None, [".".join([*sections, "nothing=1"])]))
    assert leaf not in caught.value.message.split("known here: ")[1].split(", ")


def test_every_constant_of_the_router_and_of_leases_is_refused_in_a_file() -> None:
    for section, cls in (("router", RouterConstants), ("lease", LeaseConstants)):
        assert {f"{section}.{each.name}" for each in dataclasses.fields(cls)} <= set(GONE)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XiB", "1e3", "nan", "9" * 400])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_pools_may_store_kv_in_different_dtypes():
    config = load(ClusterConfig, None, ["prefill.engine.kv_cache_dtype=bf16", "decode.engine.kv_cache_dtype=int8"])
    assert [config.engine_for(pool).kv_cache_dtype for pool in (config.prefill, config.decode)] == ["bf16", "int8"]


def test_a_step_is_as_large_as_its_device_bears_unless_it_is_set():
    assert EngineConfig().limits("cpu", "prefill") == (64, 512)
    assert EngineConfig().limits("cpu", "decode") == (64, 128)
    assert EngineConfig().limits("cuda", "prefill") == (64, 8192)
    assert EngineConfig().limits("cuda", "decode") == (256, 2048)
    assert EngineConfig().largest_limits("cuda") == (256, 8192)
    assert EngineConfig(max_num_batched_tokens=64).limits("cuda", "decode") == (64, 64)
    assert EngineConfig(max_num_seqs=200).limits("cpu", "decode") == (200, 215)  # a block beside all other sequences
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens must be a whole number \(at least 1\)"):
        EngineConfig(max_num_batched_tokens=0)


RELATIONS = [
    (["router.heartbeat_lost_s=2"], ["router.heartbeat_lost_s", "3 times router.heartbeat_interval_s"]),
    (["router.max_deadline_s=1"], ["router.max_deadline_s must be at least 600", "router.default_deadline_s"]),
    (["router.default_deadline_s=7200"], ["router.max_deadline_s", "router.default_deadline_s (7200)"]),
    (["router.http_port=50051"], ["router.http_port and router.grpc_port are both 50051"]),
    (["router.link_port=8000"], ["router.http_port and router.link_port are both 8000"]),
    (["router.placement=disaggregated", "prefill.replicas=0"], ["router.placement", "prefill.replicas"]),
    (["engine.batch_invariant=true", "engine.kv_cache_dtype=int8"], ["batch_invariant", "kv_cache_dtype"]),
    (["prefill.engine={block_size: 8}"], ["prefill.engine.block_size and decode.engine.block_size"]),
    (["prefill.engine={dtype: float32}"], ["prefill.engine.dtype and decode.engine.dtype"]),
    (["engine.device=cuda", "engine.pipeline_parallel_size=2"], ["engine.device is cuda", "2 ranks", "set kv_cache_memory"]),
    (["prefill.num_gpus=2", "prefill.engine.tensor_parallel_size=2"], ["prefill.num_gpus is 2", "set kv_cache_memory"]),
    (
        ["engine.kv_cache_memory=1GiB", "prefill.num_gpus=1", "prefill.engine.tensor_parallel_size=2"],
        ["prefill.num_gpus is 1", "set num_gpus to 2"],
    ),
    (
        ["engine.backend=vllm", "decode.num_gpus=1", "decode.engine.tensor_parallel_size=2"],
        ["decode.num_gpus is 1", "set num_gpus to 2"],
    ),
    (
        ["engine.backend=vllm", "engine.tensor_parallel_size=2", "engine.vllm.url=http://127.0.0.1:1"],
        ["vllm.url", "tensor_parallel_size 2", "its own command"],
    ),
    (
        ["engine.backend=vllm", "engine.tensor_parallel_size=16", "engine.vllm.nodes=3"],
        ["vllm.nodes 3", "16 ranks", "use 1 or 2 or 4 or 8 or 16"],
    ),
    (["engine.backend=vllm", "engine.vllm={nodes: 2, url: 'http://a:1'}"], ["url", "leave out command, args and nodes"]),
    (["engine.rank_collective=gloo"], ["rank_collective is gloo", "a worker has one rank"]),
    (
        ["engine.rank_collective=nccl", "engine.backend=vllm", "engine.tensor_parallel_size=2"],
        ["rank_collective is nccl", "backend is vllm"],
    ),
    (
        ["engine.speculative_config={method: suffix}", "engine.backend=vllm"],
        ["engine.speculative_config is for the backend pdserve", "vllm.args"],
    ),
    (
        ["engine.speculative_config={method: self}", "engine.tensor_parallel_size=2"],
        ["speculative_config.method self drafts with one rank", "use suffix"],
    ),
    (["engine.speculative_config={method: draft_model}"], ["engine.speculative_config.model must be set", "draft_model"]),
    (
        ["engine.speculative_config={method: suffix, model: tiny}"],
        ["engine.speculative_config.model is only for the method draft_model", "method is suffix"],
    ),
    (
        ["engine.speculative_config={method: ngram, prompt_lookup_min: 5, prompt_lookup_max: 4}"],
        ["engine.speculative_config.prompt_lookup_max must be at least prompt_lookup_min (5)", "got 4"],
    ),
    (["prefill.engine={model: tiny}"], ["prefill.engine.model and decode.engine.model"]),
    (
        ["decode.engine={quantization: int4}"],
        ["prefill.engine.quantization (none)", "decode.engine.quantization (int4)", "router.allow_mixed_quantization"],
    ),
]


@pytest.mark.parametrize(("overrides", "names"), RELATIONS, ids=lambda value: value[0] if isinstance(value, list) else None)
def test_settings_that_contradict_each_other_are_both_named(overrides: list[str], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ClusterConfig, None, overrides)
    for name in names:
        assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_relations_hold_at_their_edges() -> None:
    LeaseConfig(heartbeat_s=1.0, lost_s=2.0, stalled_s=2.0)
    for name in ("lost_s", "stalled_s"):
        with pytest.raises(ConfigError, match=rf"^lease\.{name} must be at least 2, twice the pause between renewals"):
            LeaseConfig(heartbeat_s=1.0, **{name: 1.5})
    RouterConfig(heartbeat_interval_s=0.5, heartbeat_lost_s=1.5, max_deadline_s=9.0, default_deadline_s=9.0)
    RouterConfig(http_port=0, grpc_port=0, link_port=0)


def test_pools_of_different_quantization_need_to_be_asked_for() -> None:
    """They may differ on purpose: decode is bound by the bytes of weights, prefill is not."""
    asked = ["decode.engine={quantization: int8}", "router.allow_mixed_quantization=true"]
    config = load(ClusterConfig, None, asked)
    assert [config.engine_for(pool).quantization for pool in (config.prefill, config.decode)] == [None, "int8"]
    load(ClusterConfig, None, ["decode.engine={quantization: int8}", "prefill.replicas=0"])
    load(ClusterConfig, None, ["engine.quantization=int8"])


@pytest.mark.parametrize("host", ["0.0.0.0", "", "10.0.0.7", "::", "[::]", "router.example"])
def test_an_empty_token_is_refused_where_others_can_reach_the_link(host: str) -> None:
    """Whoever reached the address could join as a worker, and be sent prompts."""
    for router, setting in (({"host": host}, "router.host"), ({"link_host": host}, "router.link_host")):
        with pytest.raises(ConfigError) as caught:
            RouterProcessConfig(RouterConfig(**router))
        assert all(name in caught.value.message for name in ("cluster_token", setting))
        RouterProcessConfig(RouterConfig(**router), cluster_token="secret")
    with pytest.raises(ConfigError, match="cluster_token is empty and host"):
        WorkerConfig("w", "127.0.0.1:1", host=host)
    WorkerConfig("w", "127.0.0.1:1", host=host, cluster_token="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"])
def test_loopback_needs_no_token(host: str) -> None:
    RouterProcessConfig(RouterConfig(host=host))
    RouterProcessConfig(RouterConfig(host="0.0.0.0", link_host=host))
    WorkerConfig("w", "127.0.0.1:1", host=host)


def test_a_worker_whose_router_is_lost_before_it_can_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="router_lost_s must be at least 3, 3 times heartbeat_interval_s"):
        WorkerConfig("w", "127.0.0.1:1", heartbeat_interval_s=1.0, router_lost_s=2.0)


def test_more_threads_than_torch_survives_are_refused() -> None:
    """torch ended the worker with a segmentation fault when the machine refused it a thread."""
    with pytest.raises(ConfigError, match=r"engine\.threads must be a whole number \(at least 0 and at most 1024\), got 99999"):
        load(ClusterConfig, None, ["engine.threads=99999"])


def test_one_pool_alone_may_compute_with_gangs() -> None:
    config = load(ClusterConfig, None, ["prefill.engine.tensor_parallel_size=2", "prefill.engine.pipeline_parallel_size=3"])
    assert [config.engine_for(pool).ranks for pool in (config.prefill, config.decode)] == [6, 1]


@pytest.mark.parametrize(
    ("engine", "cores", "says"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4, ""),
        ({"tensor_parallel_size": 2, "threads": 2}, 4, ""),
        ({"threads": 64}, 1, ""),
        ({"tensor_parallel_size": 8, "threads": 8, "oversubscribe": True}, 1, ""),
        ({"tensor_parallel_size": 8, "backend": "vllm", "device": "cuda"}, 2, ""),
        (
            {"tensor_parallel_size": 4},
            2,
            r"^tensor_parallel_size 4 x pipeline_parallel_size 1 are 4 ranks, and node-7 has 2 cores: lower these numbers.*"
            r"oversubscribe: true",
        ),
        ({"pipeline_parallel_size": 2}, 1, "are 2 ranks, and node-7 has 1 core: "),
        ({"tensor_parallel_size": 2, "threads": 2}, 3, "are 2 ranks of 2 threads, and node-7 has 3 cores"),
    ],
)
def test_a_gang_needs_a_core_for_each_thread_of_each_rank(engine: dict[str, object], cores: int, says: str) -> None:
    config = EngineConfig(**engine)
    if not says:
        config.check_cores(cores, "node-7")
        return
    with pytest.raises(ConfigError, match=says):
        config.check_cores(cores, "node-7")


def test_a_class_keeps_what_the_settings_do_not_change() -> None:
    changes = "router.slo_classes={chat: {priority: 10}, mine: {tpot_s: 1, queue_share: 0.25}, batch: {ttft_s: null}}"
    classes = load(ClusterConfig, None, [changes, "router.default_class=mine"]).router.classes()
    assert classes["chat"] == SloClass("chat", ttft_s=0.5, tpot_s=0.05, priority=10)
    assert classes["mine"] == SloClass("mine", tpot_s=1.0, queue_share=0.25)
    assert classes["batch"] == SloClass("batch", priority=-1, queue_share=0.5)
    assert classes["voice"] == BUILT_IN["voice"]
    assert set(classes) == {*BUILT_IN, "mine"}
