"""Tables on the terminals that people have."""

from __future__ import annotations

import pytest
from rich.console import Console

from pdserve.commands import tables
from pdserve.rpc.v1 import common_pb2, inference_pb2


def _drawn(width: int, **blocks: int) -> str:
    worker = inference_pb2.WorkerState(
        worker_id="prefill-10",
        role=common_pb2.ROLE_PREFILL,
        ready=True,
        heartbeat_age_s=0.5,
        blocks=common_pb2.BlockCounts(total=32768, free=32000, held=768, **blocks),
    )
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(tables.status(inference_pb2.GetClusterStateResponse(workers=[worker]), console.width))
    return captured.get()


def test_status_on_80_columns_was_a_row_of_dots() -> None:
    drawn = _drawn(80)
    assert all(name in drawn for name in ("free", "held", "queued", "running", "leases", "beat", "32000", "768", "0.5 s"))
    assert "…" not in drawn


@pytest.mark.parametrize("width", [80, 100, 139, 140, 200])
@pytest.mark.parametrize("rare", tables.RARE)
def test_rare_blocks_are_shown_at_any_width_when_there_are_some(width: int, rare: str) -> None:
    drawn = _drawn(width, **{rare: 12})
    assert " 12 " in drawn
    assert "32000 " in drawn
    assert "…" not in drawn


def _shown(state: inference_pb2.GetClusterStateResponse, width: int = 80) -> str:
    console = Console(width=width, highlight=False, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(tables.status(state, console.width))
    return captured.get()


def test_status_says_who_drains_and_why_one_is_not_ready() -> None:
    workers = [
        inference_pb2.WorkerState(worker_id="decode-0", ready=True),
        inference_pb2.WorkerState(worker_id="decode-1", draining=True, not_ready_reason="it drains"),
        inference_pb2.WorkerState(worker_id="decode-2", not_ready_reason="no KV round trip [yet]"),
    ]
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=workers))
    assert "\x1b[32myes" in shown
    assert "\x1b[33mdraining" in shown
    assert "\x1b[31mno" in shown
    assert "decode-1 is not ready: it drains" in shown
    assert "decode-2 is not ready: no KV round trip [yet]" in shown
    assert "decode-0 is not ready" not in shown


def test_blocks_that_nobody_accounts_for_are_red() -> None:
    counts = common_pb2.BlockCounts(total=10, unaccounted=3)
    worker = inference_pb2.WorkerState(worker_id="decode-0", ready=True, blocks=counts)
    for width in (80, 160):
        assert "\x1b[31m3" in _shown(inference_pb2.GetClusterStateResponse(workers=[worker]), width)


def test_pairs_set_aside_say_why_and_for_how_long() -> None:
    reason = "a KV read failed: the peer at 10.0.0.7:7001 did not answer within 5.0 s, tried for the third time"
    pairs = [
        inference_pb2.SetAsidePair(
            prefill_worker="prefill-0", decode_worker="decode-1", reason=reason, remaining_s=12.4, failures=3
        ),
        inference_pb2.SetAsidePair(
            prefill_worker="prefill-1", decode_worker="decode-1", reason="layouts differ", remaining_s=float("inf"), failures=1
        ),
    ]
    shown = _shown(inference_pb2.GetClusterStateResponse(set_aside_pairs=pairs))
    assert "pairs set aside" in shown
    assert "12 s" in shown
    assert "never" in shown
    assert reason.split()[-1] in shown
    assert "…" not in shown
    assert "set aside" not in _shown(inference_pb2.GetClusterStateResponse())
