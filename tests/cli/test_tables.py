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
