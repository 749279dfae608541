"""The cost model: its arithmetic against times by hand, the steps of a run against both, and the presets against their data."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.worker.messages import Abort, Reserve
from sim.perf.clock import Clock
from sim.perf.cluster import ClusterSpec, PerfCluster, calm_router, run_cluster, simulate
from sim.perf.costs import LLAMA2_70B_A100, LLAMA2_70B_H100, OPT_13B_A100, CostModel, StepWork
from sim.perf.engine import PerfEngine
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
# Binary fractions: sums of them are exact.
COSTS = CostModel(
    name="by_hand",
    prompt_base_s=1 / 64,
    prompt_token_s=1 / 1024,
    prompt_pair_s=0.0,
    decode_base_s=1 / 32,
    decode_s=1 / 256,
    context_token_s=1 / 4096,
    kv_bytes_per_token=1024,
    kv_tokens=4096,
    transfer_bytes_s=1024 * 1024,
)
SHAPE = PerfWorkerShape(COSTS, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=2048)


def test_a_step_costs_the_sum_of_its_parts():
    work = StepWork(prompt_tokens=10, prompt_pairs=55, decodes=3, context_tokens=300)
    assert COSTS.step_s(work) == 1 / 32 + 10 / 1024 + 3 / 256 + 300 / 4096
    assert COSTS.step_s(StepWork(prompt_tokens=10)) == 1 / 64 + 10 / 1024
    assert COSTS.step_s(StepWork()) == 0.0


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_stride_costs_the_sum_of_its_steps(steps):
    works = [StepWork(decodes=3, context_tokens=300 + 3 * i) for i in range(steps)]
    assert COSTS.steps_s(works[0], steps) == sum(map(COSTS.step_s, works))


def test_one_request_takes_the_time_that_a_hand_computes():
    """A prompt of 100 tokens in chunks of 64 and 36, its KV over the network, and two more tokens."""
    spec = ClusterSpec([SHAPE], [SHAPE], calm_router(), block_size=16, max_tokens=64, hop_s=1 / 4096)
    report = simulate(spec, [TraceRequest(2.0, 100, 3, (1,))])
    (served,) = report.served
    hop_s = 1 / 4096
    chunks_s = (1 / 64 + 64 / 1024) + (1 / 64 + 36 / 1024)
    # Bind and Reserved, then Prefill; token 0 returns to the router after the second chunk.
    assert served.report.ttft_s == 2 * hop_s + hop_s + chunks_s + hop_s
    # The reader hears of the first chunk, whose 64 tokens pass for longer than the second chunk takes: 36 more follow at once.
    # The commit is two messages. All this counts from token 0.
    activated_s = hop_s + 64 / 1024 + 36 / 1024 + 2 * hop_s - (1 / 64 + 36 / 1024)
    steps_s = (1 / 32 + 1 / 256 + 100 / 4096) + (1 / 32 + 1 / 256 + 101 / 4096)
    assert served.report.tpot_s == (activated_s + steps_s) / 2
    assert served.computed_tokens == 100


@pytest.mark.parametrize("prefill", [1, 0], ids=["disaggregated", "colocated"])
def test_the_first_decoded_token_goes_out_after_its_own_step_and_not_at_the_end_of_a_stride(prefill):
    """It went out with the 64 tokens of its stride, so the gap after the first token was that of 64 steps."""
    spec = ClusterSpec([SHAPE] * prefill, [SHAPE], calm_router(), block_size=16, max_tokens=256, hop_s=1 / 4096)
    (served,) = simulate(spec, [TraceRequest(2.0, 64, 200, (1,))]).served
    transfer_s = prefill * (64 / 1024 + 4 / 4096)  # the KV of the one chunk passes, the reader hears of it and tells the router
    step_s = 1 / 32 + 1 / 256 + 64 / 4096
    gap_s = served.report.first_decode_s - served.report.ttft_s
    assert step_s <= gap_s <= step_s + transfer_s
    assert served.report.tpot_s > step_s, "the later steps read more"


def test_a_sequence_that_ends_early_leaves_nothing_in_the_engine_but_its_place_in_the_last_stride():
    """The engine had remembered each cancelled sequence that had decoded for as long as it ran."""
    clock = Clock()
    engine = PerfEngine(
        clock, COSTS, lambda events: None, num_blocks=128, block_size=16, max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=2048, prefix_salt=None,
    )  # fmt: skip
    for number in range(1, 21):
        engine.left[SeqId(number)] = 100
        engine.submit(Reserve(SeqId(number), RequestSpec((1,) * 16, SamplingParams(max_tokens=100)), local_prefill=True))
        while number not in engine.scheduler.begun:
            assert clock.step(), "it never decodes"
        engine.submit(Abort(SeqId(number)))
        while clock.step():
            pass
    assert len(engine.scheduler.begun) <= 1


def test_a_command_cuts_a_stride_at_the_end_of_its_step():
    """The second request is reserved after the step that runs, though a stride of many steps was planned."""
    spec = ClusterSpec([], [SHAPE], calm_router(), block_size=16, max_tokens=64, hop_s=1 / 4096)
    alone = simulate(spec, [TraceRequest(0.0, 16, 60, (1,))])
    both = simulate(spec, [TraceRequest(0.0, 16, 60, (1,)), TraceRequest(1.0, 16, 2, (2,))])
    second = next(one for one in both.served if one.request_id == "r1")
    longest_step_s = 1 / 32 + 1 / 256 + 76 / 4096
    prompt_s = 1 / 32 + 16 / 1024 + 1 / 256 + 76 / 4096
    assert alone.span_s > 2.0
    assert second.report.ttft_s <= longest_step_s + prompt_s + 2 / 4096


def test_a_stride_teaches_the_time_of_a_step_as_often_as_its_steps_would():
    """Each stride had counted as one step, so the time of a step that a worker tells lagged ten times as long as a real one."""
    costs = replace(COSTS, context_token_s=0.0)
    spec = ClusterSpec([], [replace(SHAPE, costs=costs)], calm_router(), block_size=16, max_tokens=512)
    cluster = PerfCluster(spec, [*[TraceRequest(0.0, 16, 60, (i,)) for i in range(1, 7)], TraceRequest(10.0, 16, 512, (9,))])
    run_cluster(cluster)
    (worker,) = cluster.workers.values()
    # The means forget by e in 64 steps, and 511 steps of one sequence were the last ones.
    assert worker.load().decode_step_s == pytest.approx(costs.step_s(StepWork(decodes=1)), rel=1e-3)


def _relative_fit(columns: list[np.ndarray], times: np.ndarray) -> np.ndarray:
    """Return the coefficients that make the sum of squared relative errors the least."""
    found, *_ = np.linalg.lstsq(np.stack(columns, 1) / times[:, None], np.ones(len(times)), rcond=None)
    return found


@pytest.mark.parametrize(("hardware", "model"), [("a100-80gb", LLAMA2_70B_A100), ("h100-80gb", LLAMA2_70B_H100)])
def test_the_splitwise_presets_are_fits_of_its_table(hardware, model):
    path = DATA / "splitwise-sim" / "perf_model.csv"
    if not path.exists():
        pytest.skip("the table of splitwise-sim is not beside this checkout")
    with path.open(newline="") as file:
        rows = [
            r
            for r in csv.DictReader(file)
            if (r["model"], r["hardware"], r["tensor_parallel"]) == ("llama2-70b", hardware, "8")
        ]
    assert len(rows) == 105
    prompt, batch, out = (np.array([float(r[name]) for r in rows]) for name in ("prompt_size", "batch_size", "token_size"))
    first_s, later_s = (np.array([float(r[name]) / 1e3 for r in rows]) for name in ("prompt_time", "token_time"))
    prompts = _relative_fit([np.ones(105), prompt * batch, batch * prompt**2 / 2], first_s)
    decodes = _relative_fit([np.ones(105), batch, batch * (prompt + out / 2)], later_s)
    assert prompts == pytest.approx([model.prompt_base_s, model.prompt_token_s, model.prompt_pair_s], rel=2e-3)
    assert decodes == pytest.approx([model.decode_base_s, model.decode_s, model.context_token_s], rel=2e-3)


def test_the_opt_preset_is_distserves_profile():
    path = DATA / "distserve" / "profiler-a100-80g.distserve.json"
    if not path.exists():
        pytest.skip("the profile of DistServe is not beside this checkout")
    profile = json.loads(path.read_text())["facebook/opt-13b"]["1"]
    base_ms, token_ms, square_ms = profile["prefill"]
    assert OPT_13B_A100.prompt_s(1000) * 1e3 == pytest.approx(base_ms + 1 + 1000 * token_ms + 1000**2 * square_ms, rel=1e-3)
    base_ms, context_ms, sequence_ms = profile["decoding_smallbs"]
    step_s = OPT_13B_A100.step_s(StepWork(decodes=50, context_tokens=50_000))
    assert step_s * 1e3 == pytest.approx(base_ms + 1 + 50_000 * context_ms + 50 * sequence_ms, rel=1e-3)
