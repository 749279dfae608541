"""What an operator's alarms look at: retries by why, pairs set aside, workers that drain, blocks nobody accounts for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.report import Report, RequestRecord
from pdserve.core.sampling import Placement
from pdserve.core.slo import ClassDemand, DemandCounts
from pdserve.core.worker import ExpertLoad, HotExpert, Role, WorkerHello, WorkerLoad
from pdserve.observe.metrics import Metrics
from pdserve.observe.snapshot import (
    ClusterSnapshot,
    EjectionSnapshot,
    PairSnapshot,
    PickSnapshot,
    PrefixSnapshot,
    WorkerSnapshot,
)

REPORT = Report(
    request_id="r", placement=Placement.DISAGGREGATED, placement_reason="default", prefill_worker="p",
    decode_worker="d", prompt_tokens=3, output_tokens=2, queue_s=0.1, ttft_s=0.2, tpot_s=0.01, total_s=0.3, kv_bytes=0,
    transfer_s=0.0, exposed_transfer_s=0.0, attempts=1, binds=1,
)  # fmt: skip
RECORD = RequestRecord(REPORT, "stop")
HELLO = WorkerHello(
    WorkerId("d"), Role.DECODE, Incarnation(1), "h:1", "model", 16, 10, 64, 4, "bfloat16", 8, link_version=1, peer_version=2
)
LOAD = WorkerLoad(BlockCounts(10, 4, 1, 3, 0), running_sequences=2, leases_held=1, engine_stalled_s=7.5, numerical_errors=3)
WORKER = WorkerSnapshot(HELLO, LOAD, 0.1, 3, draining=True, not_ready_reason="it drains")
EMPTY = ClusterSnapshot(1, 0, 0, ())


def changed(record: RequestRecord, outcome: str = "", message: str = "", refusal: str = "", **fields: Any) -> RequestRecord:
    """Return a record with other fields of its report, and perhaps another end."""
    report = msgspec.structs.replace(record.report, **fields)
    return RequestRecord(report, outcome or record.outcome, message or record.message, refusal or record.refusal)


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Of one metric: by its labels' values, in the order of the labels' names."""
    samples = [s for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples]
    found = [s for s in samples if s.name == name]
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in found}


def test_retries_are_counted_by_reason_and_rebinds_apart() -> None:
    metrics = Metrics(lambda: EMPTY)
    metrics.finished(RECORD)
    assert values(metrics, "pdserve_retries_total") == {}
    metrics.finished(changed(RECORD, attempts=3, retry_reasons=("replica_lost", "lease_gone"), rebinds=2))
    metrics.finished(changed(RECORD, attempts=2, retry_reasons=("replica_lost",)))
    assert values(metrics, "pdserve_retries_total") == {("replica_lost",): 2.0, ("lease_gone",): 1.0}
    assert values(metrics, "pdserve_rebinds_total") == {(): 2.0}


def test_the_error_of_predictions_is_counted_by_class_for_requests_of_one_attempt() -> None:
    metrics = Metrics(lambda: EMPTY)
    foreseen = changed(RECORD, slo_class="chat", ttft_s=0.2, predicted_ttft_s=0.16)
    metrics.finished(foreseen)
    for other in ({"predicted_ttft_s": 0.0}, {"attempts": 2}, {"output_tokens": 0}):
        metrics.finished(changed(foreseen, **other))
    counts = values(metrics, "pdserve_ttft_prediction_error_seconds_bucket")
    assert {le: count for (le, _), count in counts.items() if count} == {
        "0.05": 1.0, "0.1": 1.0, "0.25": 1.0, "0.5": 1.0, "1.0": 1.0, "2.5": 1.0, "+Inf": 1.0
    }  # fmt: skip


def test_damaged_kv_is_counted_by_worker() -> None:
    worker = dataclasses.replace(WORKER, load=dataclasses.replace(LOAD, kv_corrupt_blocks=3, kv_rotted_blocks=1))
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=(worker,)))
    assert values(metrics, "pdserve_kv_corrupt_blocks_total") == {("decode", "d"): 3.0}
    assert values(metrics, "pdserve_kv_rotted_blocks_total") == {("decode", "d"): 1.0}


def test_picks_are_counted_by_policy_and_reason() -> None:
    picks = (PickSnapshot(Role.DECODE, "prefix_aware", "cached_prefix", 4),)
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, picks=picks))
    assert values(metrics, "pdserve_picks_total") == {("prefix_aware", "cached_prefix", "decode"): 4.0}


def test_the_index_of_held_prefixes_is_shown() -> None:
    prefixes = PrefixSnapshot(5, 700, 2, 3, ((Role.PREFILL, 11), (Role.DECODE, 0)))
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, prefixes=prefixes))
    assert values(metrics, "pdserve_prefix_keys") == {(): 5.0}
    assert values(metrics, "pdserve_prefix_index_bytes") == {(): 700.0}
    assert values(metrics, "pdserve_prefix_keys_evicted_total") == {(): 2.0}
    assert values(metrics, "pdserve_prefix_resyncs_total") == {(): 3.0}
    assert values(metrics, "pdserve_prefix_predicted_tokens_total") == {("prefill",): 11.0, ("decode",): 0.0}


def test_the_demand_is_shown() -> None:
    demand = DemandCounts(9.0, 7, 70, 30, 2, 14, 1.5, 4, 3, 2, 1)
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, demand=demand))
    names = ("requests", "prompt_tokens", "output_tokens", "refused", "ttft_met", "ttft_missed", "tpot_met", "tpot_missed")
    assert [values(metrics, f"pdserve_demand_{name}_total")[()] for name in names] == [7, 70, 30, 2, 4, 3, 2, 1]
    assert values(metrics, "pdserve_queued_prompt_tokens") == {(): 14.0}
    assert values(metrics, "pdserve_longest_wait_seconds") == {(): 1.5}


def test_missed_targets_are_shown_by_class_and_cause() -> None:
    """Each cause that the router counts has a place, and every class has all of them."""
    causes = [field.name for field in dataclasses.fields(ClassDemand) if field.name.startswith(("late_by", "slow_by"))]
    chat = ClassDemand("chat", **{name: 2**number for number, name in enumerate(causes)})  # type: ignore[arg-type]
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, demand=DemandCounts(classes=(chat, ClassDemand("voice")))))
    missed = values(metrics, "pdserve_demand_missed_total")
    of_chat = {cause: value for (cause, slo_class), value in missed.items() if slo_class == "chat"}
    assert len(missed) == 2 * len(of_chat)
    assert sum(of_chat.values()) == 2 ** len(causes) - 1, "a cause is missing or counts twice"
    assert of_chat["queue"] == chat.late_by_queue
    assert of_chat["failure"] == chat.late_by_failure + chat.slow_by_failure


def test_pools_are_shown_as_a_whole_and_unknown_values_are_left_out() -> None:
    before = dataclasses.replace(LOAD, output_tokens=100, decode_busy_s=1.0, uptime_s=10.0)
    load = dataclasses.replace(before, output_tokens=400, decode_busy_s=6.0, uptime_s=20.0, queued_tokens=9)
    load = dataclasses.replace(load, decode_read_bytes=1e9)
    hello = dataclasses.replace(HELLO, peak_bytes_per_s=1e9)
    ready = WorkerSnapshot(hello, load, 0.1, 0, before=before)
    fresh = dataclasses.replace(hello, worker_id=WorkerId("e"))
    new = WorkerSnapshot(fresh, dataclasses.replace(LOAD, queued_tokens=1), 0.1, 0)
    leaves = dataclasses.replace(WORKER, hello=dataclasses.replace(HELLO, worker_id=WorkerId("f")))
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=(ready, new, leaves)))
    pool = {name: values(metrics, f"pdserve_pool_{name}") for name in (
        "workers_ready", "workers", "utilisation", "busy_tokens_per_second", "queued_tokens", "running_sequences", "kv_used"
    )}  # fmt: skip
    assert pool == {
        "workers_ready": {("prefill",): 0, ("decode",): 2},
        "workers": {("prefill",): 0, ("decode",): 3},
        "utilisation": {("decode",): 0.5},
        "busy_tokens_per_second": {("decode",): 60},
        "queued_tokens": {("prefill",): 0, ("decode",): 10},
        "running_sequences": {("prefill",): 0, ("decode",): 4},
        "kv_used": {("decode",): 0.3},
    }
    assert values(metrics, "pdserve_worker_mbu") == {("decode", "d"): 0.2}
    assert values(metrics, "pdserve_worker_mfu") == {}
    drawn = values(metrics, "pdserve_worker_output_tokens_total")
    assert drawn == {("decode", "d"): 400, ("decode", "e"): 0, ("decode", "f"): 0}


def test_pools_show_their_workers_by_instruction_set() -> None:
    sets = {"a": "avx2", "b": "avx2", "c": "avx512_bf16", "d": ""}
    hellos = [dataclasses.replace(HELLO, worker_id=WorkerId(name), isa=isa) for name, isa in sets.items()]
    workers = tuple(dataclasses.replace(WORKER, hello=hello) for hello in hellos)
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=workers))
    shown = values(metrics, "pdserve_pool_workers_by_isa")
    assert shown == {("avx2", "decode"): 2, ("avx512_bf16", "decode"): 1, ("none", "decode"): 1}


def test_pools_show_the_ranks_and_cores_of_their_gangs() -> None:
    """A pool of two gangs of four looked like one of two processes."""
    gang = dataclasses.replace(HELLO, tensor_parallel_size=2, pipeline_parallel_size=2, cores=8)
    workers = tuple(dataclasses.replace(WORKER, hello=hello) for hello in (gang, dataclasses.replace(HELLO, cores=2)))
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=workers))
    assert values(metrics, "pdserve_pool_ranks") == {("decode",): 5}
    assert values(metrics, "pdserve_pool_cores") == {("decode",): 10}


def test_the_spread_over_experts_is_shown_of_workers_that_have_some() -> None:
    experts = ExpertLoad(100, 1.5, 2.5, (HotExpert(3, 1, 2.5),))
    moe = dataclasses.replace(WORKER, load=dataclasses.replace(LOAD, experts=experts))
    other = dataclasses.replace(WORKER, hello=dataclasses.replace(HELLO, worker_id=WorkerId("e")))
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=(moe, other)))
    assert values(metrics, "pdserve_worker_expert_imbalance") == {("decode", "d"): 1.5}
    assert values(metrics, "pdserve_worker_expert_worst_imbalance") == {("decode", "d"): 2.5}


def test_the_documented_metrics_of_pools_and_demand_are_those_that_exist() -> None:
    text = (Path(__file__).parents[2] / "docs/autoscaling.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(pdserve_(?:pool|demand)_\w+)`", text))
    lines = Metrics(lambda: EMPTY).render().decode().splitlines()
    found = {line.split()[2] for line in lines if line.startswith("# TYPE pdserve_")}
    assert documented == {name for name in found if name.startswith(("pdserve_pool_", "pdserve_demand_"))}
    assert set(re.findall(r"^\| `(pdserve_\w+?)(?:_total)?`", text, re.M)) <= {name.removesuffix("_total") for name in found}


def test_the_cluster_shows_pairs_set_aside_draining_workers_and_lost_blocks() -> None:
    pair = PairSnapshot("p", "d", "a KV read failed", 3.0, 1)
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=(WORKER,), set_aside=(pair,), num_set_aside=1))
    assert values(metrics, "pdserve_pairs_set_aside") == {(): 1.0}
    assert values(metrics, "pdserve_worker_draining") == {("decode", "d"): 1.0}
    assert values(metrics, "pdserve_worker_link_version") == {("decode", "d"): 1.0}
    assert values(metrics, "pdserve_worker_peer_version") == {("decode", "d"): 2.0}
    assert values(metrics, "pdserve_worker_engine_stalled_seconds") == {("decode", "d"): 7.5}
    assert values(metrics, "pdserve_worker_numerical_errors") == {("decode", "d"): 3.0}
    assert values(metrics, "pdserve_worker_blocks")[("decode", "unaccounted", "d")] == 2.0
    assert values(Metrics(lambda: EMPTY), "pdserve_pairs_set_aside") == {(): 0.0}


def test_the_cluster_shows_who_is_ejected_and_counts_ejections_by_pool_and_cause() -> None:
    out = dataclasses.replace(WORKER, ejected=True)
    counts = (EjectionSnapshot(Role.DECODE, "failures", 2), EjectionSnapshot(Role.PREFILL, "unreachable", 1))
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=(out, WORKER), ejections=counts))
    assert values(metrics, "pdserve_ejected_workers") == {("prefill",): 0.0, ("decode",): 1.0}
    assert values(metrics, "pdserve_ejections_total") == {("failures", "decode"): 2.0, ("unreachable", "prefill"): 1.0}
