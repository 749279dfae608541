"""How much goes to the KV pool: arithmetic, and the order of things on a device that only counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.ids import SeqId
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.memory.budget import (
    GPU_MARGIN_BYTES,
    REST_BYTES,
    DeviceReading,
    check_device,
    check_host,
    gpu_pool_bytes,
    weights_bytes,
)
from pdserve.engine.memory.device import TRIAL_BLOCKS, PoolMeasure
from pdserve.engine.memory.largest_steps import LONG_TOKENS, StepLimits, largest_steps
from pdserve.engine.warm_up import check_before_loading, settle_on

sizes = st.integers(0, 200_000)
shares = st.floats(0.01, 1.0)


@st.composite
def readings(draw: st.DrawFn) -> DeviceReading:
    total = draw(st.integers(1, 200_000))
    free = draw(st.integers(0, total))
    loaded = draw(st.integers(0, free))
    return DeviceReading(total, free, loaded, draw(sizes), later=draw(sizes), margin=draw(sizes))


def pool_of(reading: DeviceReading, share: float, block: int = 1) -> int | None:
    """None: refused, with the settings that would help."""
    try:
        return gpu_pool_bytes(reading, share, block)
    except ConfigError as refused:
        return None if all(n in refused.message for n in ("gpu_memory_utilization", "max_num_batched_tokens")) else -1


@settings(deadline=None)
@given(readings(), shares, st.integers(1, 1000))
def test_the_pool_takes_all_that_weights_and_step_leave_of_the_share_and_of_the_device(reading, share, block):
    weights = reading.free_at_start - reading.free_with_weights
    left_of_share = int(reading.total * share) - weights - reading.step - reading.later
    left = min(left_of_share, reading.free_with_weights - reading.step - reading.later - reading.margin)
    assert pool_of(reading, share, block) == (left if left >= block else None)


@settings(deadline=None)
@given(readings(), shares, shares)
def test_a_larger_share_never_gives_a_smaller_pool(reading, one, other):
    low, high = sorted((one, other))
    assert (pool_of(reading, high) or 0) >= (pool_of(reading, low) or 0)


def test_two_workers_on_one_gpu_get_the_shares_that_they_were_given():
    """The second finds the first one's memory taken; its own share counts what it took itself."""
    total, weights, step = 1000, 100, 50
    first = gpu_pool_bytes(DeviceReading(total, total, total - weights, step), 0.45, 1)
    left = total - weights - step - first
    second = gpu_pool_bytes(DeviceReading(total, left, left - weights, step), 0.45, 1)
    assert first == second == 300


@settings(deadline=None)
@given(sizes, sizes, sizes, sizes)
def test_a_host_is_refused_exactly_when_the_sum_is_more_than_there_is(weights, pool, step, later):
    needed = weights + pool + step + later + REST_BYTES
    check_host(available=needed, weights=weights, pool=pool, step=step, later=later)
    with pytest.raises(ConfigError, match="lower kv_cache_memory or max_num_batched_tokens"):
        check_host(available=needed - 1, weights=weights, pool=pool, step=step, later=later)


class CountingDevice:
    """Freed memory stays with the allocator until it is released."""

    def __init__(self, total: int = 10_000, others: int = 0) -> None:
        self._total = total
        self._others = others
        self.held = 0
        self.kept = 0

    def take(self, size: int) -> None:
        if size > self.free() + self.kept:
            raise torch.OutOfMemoryError("planted")
        self.kept -= min(size, self.kept)
        self.held += size

    def drop(self, size: int) -> None:
        self.held -= size
        self.kept += size

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._others - self.held - self.kept

    def release(self) -> None:
        self.kept = 0


WEIGHTS, RECORDINGS, STEPS, BLOCK = 2000, 300, (500, 200), 10


class Model:
    """On a pool; what it holds goes back to the allocator when nobody holds it any more."""

    def __init__(self, device: CountingDevice, kv_bytes: int) -> None:
        self.device = device
        device.take(kv_bytes + RECORDINGS)
        weakref.finalize(self, device.drop, kv_bytes + RECORDINGS)

    def step(self, size: int) -> None:
        self.device.take(size)
        self.device.drop(size)


def load(device: CountingDevice, config: EngineConfig, *, later: int = 0, margin: int = 0) -> tuple[Model, int]:
    """As a runner does it: weights, a trial, then the same for good."""
    measure = PoolMeasure(device, later=later, margin=margin)
    device.take(WEIGHTS)

    def trial(kv_bytes: int) -> list[Callable[[], object]]:
        model = Model(device, kv_bytes)
        return [partial(model.step, size) for size in STEPS]

    pool_bytes = measure.pool_bytes(config, BLOCK, trial)
    assert device.held == WEIGHTS, "the trial is gone before the pool is taken"
    assert device.kept == 0
    return Model(device, pool_bytes), pool_bytes


def serve(model: Model) -> None:
    """A real step may need what two of the trial's need together."""
    for size in (*STEPS, sum(STEPS), *STEPS):
        model.step(size)


@pytest.mark.quick("0.9-0", "0.4-5000")
@pytest.mark.parametrize(("utilization", "others"), [(1.0, 0), (0.9, 0), (0.5, 0), (0.9, 3000), (0.4, 5000)])
def test_a_measured_pool_serves_its_largest_steps_and_wastes_no_block(utilization, others):
    device = CountingDevice(others=others)
    model, pool_bytes = load(device, EngineConfig(gpu_memory_utilization=utilization))
    serve(model)
    assert pool_bytes % BLOCK == 0
    used = WEIGHTS + RECORDINGS + sum(STEPS) + pool_bytes
    room = min(int(device.total() * utilization), device.total() - others)
    assert room - BLOCK < used <= room


def test_a_measured_pool_leaves_staging_and_the_margin_alone():
    """All of the device for one worker: the kernels that come later, and the KV of a peer's dtype, still find their room."""
    device = CountingDevice()
    model, pool_bytes = load(device, EngineConfig(gpu_memory_utilization=1.0), later=700, margin=400)
    serve(model)
    device.release()
    assert device.free() >= 700 + 400 + sum(STEPS)
    assert pool_bytes == device.total() - WEIGHTS - RECORDINGS - sum(STEPS) - 700 - 400


def test_a_pool_that_was_set_too_large_for_staging_and_the_margin_is_refused():
    check_device(free=700 + GPU_MARGIN_BYTES, later=700)
    with pytest.raises(ConfigError, match="lower kv_cache_memory"):
        check_device(free=699 + GPU_MARGIN_BYTES, later=700)


class Runner:
    """As much of a `ModelRunner` as settling uses, with one step that takes `size`."""

    def __init__(self, device: CountingDevice, size: int) -> None:
        self.kv = SimpleNamespace(caches=(SimpleNamespace(blocks=torch.ones(4)),))
        self._device = device
        self._size = size

    def largest_steps(self, config: EngineConfig) -> tuple[StepPlan, ...]:
        return (self.prompt_step(config),)

    def prompt_step(self, config: EngineConfig) -> StepPlan:
        return StepPlan((SequenceSlice(SeqId(0), 0, (1, 2, 3), ((),), ()),))

    def take_memory(self, step: StepPlan) -> None:
        self._device.take(self._size)
        self._device.drop(self._size)

    execute = take_memory


@pytest.mark.parametrize("spare", [0, -1])
def test_settling_on_a_gpu_refuses_a_set_pool_without_room_for_staging_and_the_margin(spare):
    """The step's memory is given back before it is asked what is free. What the steps wrote into the pool is wiped."""
    later, step = 700, 500
    device = CountingDevice(total=GPU_MARGIN_BYTES + later + spare)
    runner = Runner(device, step)
    config = EngineConfig(kv_cache_memory=MIB)
    if spare < 0:
        with pytest.raises(ConfigError, match="lower kv_cache_memory"):
            settle_on(device, runner, config, later=later)
    else:
        assert settle_on(device, runner, config, later=later).step_bytes == step
    assert not runner.kv.caches[0].blocks.any()
    settle_on(device, runner, EngineConfig(), later=later)  # one that was measured has been sized for it


def test_a_pool_that_forgot_the_recordings_would_run_out():
    device = CountingDevice()
    _, pool_bytes = load(device, EngineConfig(gpu_memory_utilization=1.0))
    fresh = CountingDevice()
    fresh.take(WEIGHTS)
    with pytest.raises(torch.OutOfMemoryError):
        serve(Model(fresh, pool_bytes + RECORDINGS))


@pytest.mark.parametrize("total", [WEIGHTS + 100, WEIGHTS + TRIAL_BLOCKS * BLOCK + RECORDINGS + 100])
def test_a_step_that_does_not_fit_at_all_names_what_to_lower(total):
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens"):
        load(CountingDevice(total), EngineConfig())


def test_another_failure_of_the_trial_is_not_called_a_lack_of_memory():
    def trial(kv_bytes: int) -> list[Callable[[], object]]:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        PoolMeasure(CountingDevice()).pool_bytes(EngineConfig(), BLOCK, trial)


@st.composite
def limits(draw: st.DrawFn) -> StepLimits:
    blocks, size = draw(st.integers(2, 40)), draw(st.integers(1, 16))
    longest = draw(st.integers(2, blocks * size))
    windows = draw(st.lists(st.integers(1, 300), max_size=2))
    seqs, tokens, drafts = draw(st.integers(1, 20)), draw(st.integers(1, 300)), draw(st.sampled_from([0, 1, 16]))
    return StepLimits(blocks, size, seqs, tokens, longest, windows=tuple(windows), drafts=drafts)


@settings(deadline=None)
@given(limits(), st.lists(st.integers(1, 30), max_size=3))
def test_the_largest_steps_could_be_planned_and_reach_every_bound(limits, batches):
    plans = largest_steps(limits, gathered=100, decode_batches=tuple(batches))
    for plan in plans:
        assert plan.slices
        assert len({piece.seq_id for piece in plan.slices}) == len(plan.slices) <= limits.max_num_seqs
        assert plan.num_tokens <= limits.max_num_batched_tokens
        for piece in plan.slices:
            end = piece.start + len(piece.token_ids)
            assert len(piece.token_ids) >= 1
            assert 0 <= piece.start < end < limits.max_model_len
            assert len(set(piece.block_tables[0])) == len(piece.block_tables[0]) == -(-end // limits.block_size)
            assert all(0 <= block < limits.num_blocks for block in piece.block_tables[0])
    wide, long = plans[:2]
    most = min(limits.max_num_batched_tokens, limits.sequences * (limits.max_model_len - 1))
    assert wide.num_tokens == most
    assert len(wide.specs) == limits.sequences
    prompt = long.slices[-1]
    assert prompt.start + len(prompt.token_ids) == limits.max_model_len - 1
    assert len(prompt.token_ids) <= LONG_TOKENS
    windows = [size for size in limits.windows if size < limits.max_model_len]
    drafted = limits.drafts > 0 and limits.max_model_len > 2
    assert len(plans) == 2 + len(windows) + len(batches) + drafted
    if drafted:
        rows = min(limits.max_num_seqs + limits.drafts, most)
        assert plans[-1].num_tokens == len(plans[-1].specs) == rows, "a step draws after no more rows"
        assert plans[-1].slices[0].drafts or rows == 1
    for window, plan in zip(windows, plans[2:], strict=False):
        assert len(plan.slices) == min(limits.sequences, max(1, 100 // window)), "a turn of attention takes so many"
        assert all(window <= piece.start + 1 for piece in plan.slices), "each sees a whole window"


def test_weights_are_guessed_from_the_card(tiny_dir, make_runner):
    card = ModelCard.load(tiny_dir)
    measured = make_runner().weights_bytes
    assert 0.95 * measured < weights_bytes(card, 32) <= measured


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_a_share_of_a_gpu_is_a_share(share):
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_a_pool_that_is_given_is_never_measured():
    assert EngineConfig().cpu_kv_bytes == 256 * MIB
    assert EngineConfig(kv_cache_memory=MIB).cpu_kv_bytes == MIB
    assert EngineConfig(device="cpu").known_kv_bytes == 256 * MIB
    assert EngineConfig(device="cuda").known_kv_bytes is None
    assert EngineConfig(device="auto").known_kv_bytes is None
    assert EngineConfig(device="cuda", kv_cache_memory=MIB).known_kv_bytes == MIB
    assert PoolMeasure.of(torch.device("cuda"), EngineConfig(kv_cache_memory=MIB)) is None
    assert PoolMeasure.of(torch.device("cpu"), EngineConfig()) is None


@pytest.mark.parametrize(("quantization", "bits"), [(None, 16), ("int8", 8), ("int4", 5)])
def test_memory_before_loading_counts_weights_as_they_are_packed(quantization, bits, monkeypatch):
    """A model that fits only as int4 starts as int4. The scales of int4 take a fifth bit."""
    card = ModelCard.load(resolve("tiny"))
    config = EngineConfig(quantization=quantization, device="cpu", kv_cache_memory=MIB)
    needed = weights_bytes(card, bits) + MIB + REST_BYTES
    monkeypatch.setattr("pdserve.engine.memory.host.available_bytes", lambda: needed)
    check_before_loading(card, config)
    monkeypatch.setattr("pdserve.engine.memory.host.available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match="not enough memory"):
        check_before_loading(card, config)
