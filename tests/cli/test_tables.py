"""Tables on the terminals that people have."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.live import Live

from pdserve.cluster.events import WorkerChanged, WorkerLoads, WorkerPhase
from pdserve.cluster.keeping.order import WorkerReport
from pdserve.commands import tables
from pdserve.commands.console import make_console
from pdserve.commands.failures import report
from pdserve.commands.progress import LINE_S, StartView
from pdserve.commands.up import first_request
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve.worker.start_report import LoadState, MemoryReport

PREFILL = common_pb2.WorkerHello(worker_id="prefill-10", role=common_pb2.ROLE_PREFILL, num_blocks=32768)


def _drawn(width: int, **blocks: int) -> str:
    counts = common_pb2.BlockCounts(total=32768, free=32000, held=768, **blocks)
    worker = inference_pb2.WorkerState(hello=PREFILL, load={"blocks": counts}, ready=True, heartbeat_age_s=0.5)
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


def test_status_shows_a_budget_that_an_operator_has_lowered() -> None:
    def state(now: int) -> inference_pb2.GetClusterStateResponse:
        hello = {"worker_id": "decode-0", "max_num_batched_tokens": 8192}
        worker = inference_pb2.WorkerState(hello=hello, load={"max_num_batched_tokens": now}, ready=True)
        return inference_pb2.GetClusterStateResponse(workers=[worker])

    for width in (80, 200):
        assert "256 of 8192" in " ".join(_shown(state(256), width).split())
        assert "of 8192" not in _shown(state(8192), width)


def test_status_says_nothing_of_drafts_where_none_were_made() -> None:
    workers = [inference_pb2.WorkerState(hello=PREFILL, load={"speculation": {}}), inference_pb2.WorkerState(hello=PREFILL)]
    assert "drafts" not in _shown(inference_pb2.GetClusterStateResponse(workers=workers))


@pytest.mark.parametrize("width", [100, 200])
def test_status_shows_utilisation_on_100_columns_with_a_dash_for_the_unknown(width: int) -> None:
    blocks = {"total": 32768, "free": 32000, "held": 768}
    workers = [
        inference_pb2.WorkerState(hello=PREFILL, load={"blocks": blocks}, ready=True, recent={"busy": 0.5, "mfu": 0.314}),
        inference_pb2.WorkerState(hello=PREFILL, load={"blocks": blocks}, draining=True, recent={"busy": 1.0}),
    ]
    drawn = _shown(inference_pb2.GetClusterStateResponse(workers=workers), width)
    assert "MFU" in drawn
    assert "MBU" not in drawn
    assert " 31%" in drawn
    assert " - " in drawn
    assert "…" not in drawn
    assert all(" ".join(("50%", "31%")) in " ".join(line.split()) for line in drawn.splitlines() if "yes" in line)


@pytest.mark.parametrize("width", [80, 100, 140, 160, 200])
def test_status_cut_numbers_in_two_where_columns_found_no_room(width: int) -> None:
    """The worst case has all rare columns, large numbers, and limits that an operator has lowered."""
    blocks = {"total": 32768, "free": 32001, "held": 7002, "cached": 30003, "quarantined": 5004, "unaccounted": 6005}
    hello = {"worker_id": "prefill-100", "max_num_batched_tokens": 8192, "max_num_seqs": 256}
    load = {"blocks": blocks, "queued_requests": 12346, "running_sequences": 1257, "leases_held": 10248}
    load |= {"max_num_batched_tokens": 259, "max_num_seqs": 10}
    worker = inference_pb2.WorkerState(
        hello=hello, load=load, draining=True, heartbeat_age_s=10.5, recent={"busy": 1, "mfu": 1, "mbu": 1}
    )
    drawn = _shown(inference_pb2.GetClusterStateResponse(workers=[worker]), width)
    lines = [re.sub("\x1b[^m]*m", "", line) for line in drawn.splitlines()]
    assert all(len(line) <= width for line in lines)
    told = [word for line in lines if "prefill-100" in line for word in re.split(" {2,}", line.strip())]
    numbers = ("32001", "7002", "30003", "5004", "6005", "12346", "1257", "10248", "10.5 s", "259 of 8192", "10 of 256")
    assert {*numbers} <= {*told}


def test_status_says_who_drains_and_why_one_is_not_ready() -> None:
    workers = [
        inference_pb2.WorkerState(hello={"worker_id": "decode-0"}, ready=True),
        inference_pb2.WorkerState(hello={"worker_id": "decode-1"}, draining=True, not_ready_reason="it drains"),
        inference_pb2.WorkerState(hello={"worker_id": "decode-2"}, not_ready_reason="no KV round trip [yet]"),
    ]
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=workers))
    assert "\x1b[32myes" in shown
    assert "\x1b[33mdraining" in shown
    assert "\x1b[31mno" in shown
    assert "decode-1 is not ready: it drains" in shown
    assert "decode-2 is not ready: no KV round trip [yet]" in shown
    assert "decode-0 is not ready" not in shown


def test_status_says_who_has_changed_its_role() -> None:
    hello = {"worker_id": "prefill-0", "role": common_pb2.ROLE_DECODE, "flips": 3}
    workers = [inference_pb2.WorkerState(hello=hello, ready=True), inference_pb2.WorkerState(hello={"worker_id": "decode-0"})]
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=workers))
    assert "prefill-0 is a decode worker after 3 role flips" in shown
    assert shown.count("role flips") == 1


def test_status_tells_versions_only_where_they_differ() -> None:
    old = {"link_version": 0, "peer_version": 0}
    new = {"oldest_link_version": 0, "link_version": 1, "oldest_peer_version": 2, "peer_version": 2}
    workers = [
        inference_pb2.WorkerState(hello={"worker_id": f"{role}-{n}", **versions})
        for n, versions in enumerate((old, new))
        for role in ("prefill", "decode")
    ]
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=workers), 160)
    assert "prefill-0, decode-0: version 0 of the protocol between workers, 0 of the link's protocol" in shown
    assert "prefill-1, decode-1: version 2 of the protocol between workers, 0 to 1 of the link's protocol" in shown
    assert "only workers with a common version" in shown
    assert "version" not in _shown(inference_pb2.GetClusterStateResponse(workers=workers[:2]))


def test_status_says_for_which_instruction_set_steps_are_compiled() -> None:
    sets = {"prefill-0": "avx2", "decode-0": "avx512_bf16", "decode-1": "avx2", "decode-2": ""}
    workers = [inference_pb2.WorkerState(hello={"worker_id": name, "isa": isa}, ready=True) for name, isa in sets.items()]
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=workers), 160)
    assert "prefill-0, decode-1: steps compiled for avx2" in shown
    assert "decode-0: steps compiled for avx512_bf16" in shown
    assert shown.count("steps compiled") == 2


def test_status_says_which_workers_are_gangs_and_on_how_many_cores() -> None:
    gangs = {"prefill-0": (2, 1, 4), "decode-0": (0, 0, 2), "decode-1": (2, 1, 4), "decode-2": (2, 2, 0)}
    workers = [
        inference_pb2.WorkerState(
            hello={"worker_id": name, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "cores": cores}
        )
        for name, (tensor, pipeline, cores) in gangs.items()
    ]
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=workers), 160)
    assert "prefill-0, decode-1: a gang of 2 ranks (tensor_parallel_size 2) on 4 cores each" in shown
    assert "decode-2: a gang of 4 ranks (tensor_parallel_size 2, pipeline_parallel_size 2)\n" in shown.replace(" \n", "\n")
    assert shown.count("a gang of") == 2


def test_status_says_which_workers_are_niced_and_what_to_do() -> None:
    workers = [
        inference_pb2.WorkerState(hello={"worker_id": f"decode-{n}", "niceness": nice}, ready=True)
        for n, nice in enumerate((15, 0, 15))
    ]
    shown = " ".join(_shown(inference_pb2.GetClusterStateResponse(workers=workers), 160).split())
    assert "decode-0, decode-2: niceness 15" in shown
    assert "RAY_worker_niceness=0" in shown
    assert "niceness" not in _shown(inference_pb2.GetClusterStateResponse(workers=workers[1:2]))


def test_blocks_that_nobody_accounts_for_are_red() -> None:
    counts = common_pb2.BlockCounts(total=10, unaccounted=3)
    worker = inference_pb2.WorkerState(hello={"worker_id": "decode-0"}, ready=True, load={"blocks": counts})
    for width in (80, 160):
        assert "\x1b[31m3" in _shown(inference_pb2.GetClusterStateResponse(workers=[worker]), width)


def test_damaged_kv_is_told_in_red() -> None:
    worker = inference_pb2.WorkerState(
        hello={"worker_id": "prefill-0"}, ready=True, load={"kv_corrupt_blocks": 3, "kv_rotted_blocks": 1}
    )
    shown = _shown(inference_pb2.GetClusterStateResponse(workers=[worker]))
    assert "\x1b[31mprefill-0: 3 lent KV blocks were not read as they were written" in shown
    worker = inference_pb2.WorkerState(hello={"worker_id": "prefill-0"}, ready=True)
    assert "lent KV blocks" not in _shown(inference_pb2.GetClusterStateResponse(workers=[worker]))


def test_classes_show_how_often_their_targets_were_met() -> None:
    classes = [
        inference_pb2.ClassState(slo_class="batch", window_s=300, requests=2, good=1, ttft_met=1, ttft_missed=1, shed=7),
        inference_pb2.ClassState(slo_class="chat", window_s=300, requests=2000, good=1999, ttft_met=2000, tpot_met=1999,
                                 tpot_missed=1, refused=5),
    ]  # fmt: skip
    drawn = _shown(inference_pb2.GetClusterStateResponse(classes=classes))
    assert "classes of requests, last 5 minutes" in drawn
    rows = [line.split() for line in drawn.splitlines() if line.startswith((" batch", "batch", " chat", "chat"))]
    assert rows == [
        ["batch", "2", "50.0", "%", "50.0", "%", "-", "0", "7"],
        ["chat", "2000", "99.9", "%", "100.0", "%", "99.9", "%", "5", "0"],
    ]
    assert "classes" not in _shown(inference_pb2.GetClusterStateResponse())


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


def _report(worker_id: str, role: str, memory: MemoryReport, niceness: int = 0) -> WorkerReport:
    return WorkerReport(
        worker_id, role, "127.0.0.1:34567", 1, memory, "compiled bfloat16", niceness, process_s=0.0, import_s=0.0, load_s=0.0
    )


def test_the_start_says_where_memory_goes_and_what_the_pools_hold() -> None:
    size = MemoryReport(257 << 20, 43 << 20, 256 << 20, 190 << 20, 728, 16, 8192)
    larger = replace(size, kv_bytes=512 << 20, num_blocks=1456)
    reports = [_report("prefill-0", "prefill", size), *(_report(f"decode-{n}", "decode", larger) for n in range(2))]
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(tables.pool(reports))
    shown = captured.get()
    assert "prefill: KV pool 256 MiB: 728 blocks of 16 = 11,648 tokens, 1.4 requests of" in shown
    assert "decode: KV pool 512 MiB: 1,456 blocks of 16 = 23,296 tokens, 2.8 requests of" in shown
    assert shown.count("KV pool 512 MiB") == 1, "one line for workers that are alike"
    assert "prefill: compiled bfloat16" in shown
    assert shown.count("compiled bfloat16") == 2, "one line for workers that compute alike"
    assert all(f"{part} MiB" in shown for part in (257, 43, 256, 512, 190))
    assert "…" not in shown
    with console.capture() as captured:
        console.print(tables.pool([*reports, _report("decode-2", "decode", size)]))
    assert "decode-0, decode-1: KV pool 512 MiB" in captured.get(), "alike, but not the whole pool"


@pytest.mark.parametrize("width", [80, 140])
def test_status_says_how_many_tokens_a_pool_holds_where_there_is_room(width: int) -> None:
    worker = inference_pb2.WorkerState(hello=PREFILL, ready=True, load={"blocks": {"total": 32768, "cached": 9}})
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(tables.status(inference_pb2.GetClusterStateResponse(workers=[worker], block_size=16), width))
    assert ("524,288" in captured.get()) == (width == 140)
    assert "…" not in captured.get()


def test_the_start_says_which_workers_are_niced_and_what_to_do() -> None:
    size = MemoryReport(257 << 20, 43 << 20, 256 << 20, 190 << 20, 728, 16, 8192)
    console = Console(width=80, highlight=False)
    for niceness in (0, 15):
        with console.capture() as captured:
            console.print(tables.pool([_report("prefill-0", "prefill", size), _report("decode-0", "decode", size, niceness)]))
        shown = captured.get()
        assert ("nice" in shown) == (niceness > 0)
    assert "decode-0: niceness 15" in shown
    assert "RAY_worker_niceness=0" in shown
    assert " 15 \n" in shown
    assert "…" not in shown


def test_status_says_when_tokens_depend_on_where_a_request_runs() -> None:
    worker = inference_pb2.WorkerState(hello={"worker_id": "decode-0"}, ready=True)
    for exact in (True, False):
        console = Console(width=80, highlight=False)
        with console.capture() as captured:
            console.print(tables.status(inference_pb2.GetClusterStateResponse(workers=[worker], exact=exact), 80))
        assert ("exact: false" in captured.get()) is not exact


def test_a_command_that_the_start_tells_is_not_broken_over_lines() -> None:
    """It was cut at 160 columns, so that half of a long `ray start` would have run when it was copied from a log."""
    command = "RAY_worker_niceness=0 ray start --address=192.0.2.2:6379 " + "--labels=pool=prefill" * 8
    console = Console(width=160, highlight=False)
    with console.capture() as captured:
        StartView(console, lambda: None)(WorkerChanged("prefill-0", WorkerPhase.WAITING, f"start one with: {command}"))
    assert command in captured.get()
    assert len(captured.get().splitlines()) == 1


def test_the_start_suggests_a_chat_only_to_a_model_that_has_a_template() -> None:
    assert first_request("h:1", chat=True) == "pdserve generate --address h:1 --chat 'Why is the sky blue?'"
    assert first_request("h:1", chat=False) == "pdserve generate --address h:1 'The sky is blue because'"


def test_a_terminal_draws_a_bar_for_a_worker_that_loads_and_a_log_gets_few_lines() -> None:
    loads = WorkerLoads("prefill-0", LoadState("loading weights", 3 * 10**9, 12 * 10**9, 1.5e9))
    terminal, log = Console(width=120, force_terminal=True), Console(width=160, highlight=False)
    view = StartView(terminal, lambda: None)
    for event in (WorkerChanged("prefill-0", WorkerPhase.LOADING), loads):
        view._live = Live(view, console=terminal)
        view(event)
    with terminal.capture() as captured:
        terminal.print(view)
    assert "━" in captured.get()
    assert "3.00 of 12.00 GB, 1.50 GB/s" in captured.get()
    with log.capture() as captured:
        view = StartView(log, lambda: None)
        view._began -= 2 * LINE_S
        view(loads)
        view(loads)  # a moment later
    assert captured.get().count("prefill-0 loading weights: 3.00 of 12.00 GB, 1.50 GB/s") == 1


HOSTILE = "evil\x1b]0;x\x07\x9b31m[/nope][link=http://x]"


def test_texts_of_others_command_the_terminal_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console once took a worker's id for markup, and its escape sequences reached the terminal."""
    state = inference_pb2.GetClusterStateResponse()
    state.workers.add(hello={"worker_id": HOSTILE, "flips": 1}, not_ready_reason=HOSTILE, load={"kv_corrupt_blocks": 1})
    state.set_aside_pairs.add(prefill_worker=HOSTILE, decode_worker=HOSTILE, reason=HOSTILE)
    for terminal in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", terminal)
        console = make_console()
        with console.capture() as captured:
            console.print(tables.status(state, console.width))
            console.print(HOSTILE)
        drawn = captured.get()
        assert drawn.count("[/nope]") >= 4
        assert not {"\x07", "\x9b"} & set(drawn)
        assert "\x1b]" not in drawn
        assert terminal or "\x1b" not in drawn


def test_an_error_of_another_process_commands_the_terminal_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(HOSTILE, 1) == 1
    assert capsys.readouterr().err == "error: evil]0;x31m[/nope][link=http://x]\n"


def test_blocks_that_no_pool_has_draw_no_bar_of_gigabytes() -> None:
    assert tables.bar(2.0**33, 1) == "█" * 20 + " 100%"
