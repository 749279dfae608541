"""What an operator's alarms look at: retries by why, pairs set aside, workers that drain, blocks nobody accounts for."""

from __future__ import annotations

import dataclasses

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.observe.metrics import Metrics
from pdserve.observe.record import RequestRecord
from pdserve.observe.snapshot import ClusterSnapshot, PairSnapshot, PickSnapshot, PrefixSnapshot, WorkerSnapshot

RECORD = RequestRecord(
    request_id="r", outcome="stop", placement="disaggregated", placement_reason="default", prefill_worker="p",
    decode_worker="d", prompt_tokens=3, output_tokens=2, queue_s=0.1, ttft_s=0.2, tpot_s=0.01, total_s=0.3, kv_bytes=0,
    transfer_s=0.0, exposed_transfer_s=0.0, attempts=1, binds=1,
)  # fmt: skip
HELLO = WorkerHello(WorkerId("d"), Role.DECODE, Incarnation(1), "h:1", "model", 16, 10, 64, 4, "bfloat16", 8)
LOAD = WorkerLoad(BlockCounts(10, 4, 1, 3, 0), running_sequences=2, leases_held=1, engine_stalled_s=7.5, numerical_errors=3)
WORKER = WorkerSnapshot(HELLO, LOAD, 0.1, 3, draining=True, not_ready_reason="it drains")
EMPTY = ClusterSnapshot(1, 0, 0, ())


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Of one metric: by its labels' values, in the order of the labels' names."""
    samples = [s for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples]
    found = [s for s in samples if s.name == name]
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in found}


def test_retries_are_counted_by_reason_and_rebinds_apart() -> None:
    metrics = Metrics(lambda: EMPTY)
    metrics.finished(RECORD)
    assert values(metrics, "pdserve_retries_total") == {}
    metrics.finished(msgspec.structs.replace(RECORD, attempts=3, retry_reasons=("replica_lost", "lease_gone"), rebinds=2))
    metrics.finished(msgspec.structs.replace(RECORD, attempts=2, retry_reasons=("replica_lost",)))
    assert values(metrics, "pdserve_retries_total") == {("replica_lost",): 2.0, ("lease_gone",): 1.0}
    assert values(metrics, "pdserve_rebinds_total") == {(): 2.0}


def test_the_error_of_predictions_is_counted_by_class_for_requests_of_one_attempt() -> None:
    metrics = Metrics(lambda: EMPTY)
    foreseen = msgspec.structs.replace(RECORD, slo_class="chat", ttft_s=0.2, predicted_ttft_s=0.16)
    metrics.finished(foreseen)
    for other in ({"predicted_ttft_s": 0.0}, {"attempts": 2}, {"output_tokens": 0}):
        metrics.finished(msgspec.structs.replace(foreseen, **other))
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


def test_the_cluster_shows_pairs_set_aside_draining_workers_and_lost_blocks() -> None:
    pair = PairSnapshot("p", "d", "a KV read failed", 3.0, 1)
    metrics = Metrics(lambda: dataclasses.replace(EMPTY, workers=(WORKER,), set_aside=(pair,)))
    assert values(metrics, "pdserve_pairs_set_aside") == {(): 1.0}
    assert values(metrics, "pdserve_worker_draining") == {("decode", "d"): 1.0}
    assert values(metrics, "pdserve_worker_engine_stalled_seconds") == {("decode", "d"): 7.5}
    assert values(metrics, "pdserve_worker_numerical_errors") == {("decode", "d"): 3.0}
    assert values(metrics, "pdserve_worker_blocks")[("decode", "unaccounted", "d")] == 2.0
    assert values(Metrics(lambda: EMPTY), "pdserve_pairs_set_aside") == {(): 0.0}
