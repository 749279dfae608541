"""pdserve's own engine as a worker's process runs it: the engine thread with the model, its KV pool and its transport."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvtransfer.api import DeviceKind, Region, TransferDevice
from kvtransfer.backends.registry import prepare
from kvtransfer.staging import STAGING_BLOCKS, Staging
from kvtransfer.thread import TransferThread
from pdserve.checkpoint.card import KV_DTYPES, ModelCard
from pdserve.checkpoint.progress import Progress
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import BlockSum, Incarnation, WorkerId
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup
from pdserve.core.roofline import ModelShape, StepCounts, StepFlops
from pdserve.core.worker import WorkerLoad
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.memory.host import resident_bytes
from pdserve.engine.numerics import numerics_of
from pdserve.engine.peaks import Peaks, peaks_of
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.warm_up import check_before_loading, settle
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2
from pdserve.structured.compilations import GrammarSource
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine import WorkerEngine
from pdserve.worker.engine_thread import EngineThread, EngineView, Mailbox, Runner, step_timeout_s
from pdserve.worker.messages import EngineSnapshot, SetBudget, SetLending, StepEvents
from pdserve.worker.start_report import MemoryReport

log = logging.getLogger(__name__)

FAILED_LOAD_STOP_S: Final = 1.0  # the thread has ended, unless the load took too long


class OwnEngine(WorkerEngine):
    """The engine thread of one worker. `on_death` is called when it dies of a bug."""

    def __init__(
        self, config: WorkerConfig, role: common_pb2.Role, progress: Progress, on_death: Callable[[BaseException], None]
    ) -> None:
        """`role` is the role of the first life. `progress` is told how far the loading is."""
        self.config = config
        self.transport = config.transfer.transport
        self._role = role
        self._progress = progress
        self._on_death = on_death
        self._runner: ModelRunner | None = None
        self._first_snapshot: EngineSnapshot | None = None
        self._view: EngineView | None = None
        self._events: Mailbox[StepEvents] = Mailbox()
        self._thread: EngineThread | None = None
        self._step_bytes = 0
        self._step_timeout_s = config.engine.step_timeout_s
        self._peaks = Peaks()
        self._end_ranks: Callable[[], None] = lambda: None

    def load(self) -> None:
        """Load the model in the engine thread, and measure the largest step. Raises what went wrong."""
        self._make_transport = prepare(self.transport, self.config.host, allow_public=self.config.allow_public_bind)
        engine = self.config.engine
        directory = resolve(engine.model, progress=self._progress, load_format=engine.load_format)
        self.card = ModelCard.load(directory, engine.model_family, load_format=engine.load_format)
        self.tokenizer = Tokenizer.load(directory)
        self._grammars = GrammarSource(self.tokenizer, self.card.vocab_size, self.card.eos_token_ids)
        self.start_grammar = self._grammars.start
        self._preparing = threading.Thread(target=self._grammars.prepare, name="vocabulary", daemon=True)
        self._preparing.start()
        build = lambda: self._build(directory)  # noqa: E731
        self._thread = EngineThread(build, self._events.put, self._on_death, self._sums_of, self._counts_of)
        try:
            self._thread.start(self.config.start_timeout_s)
        except BaseException:
            self.stop(FAILED_LOAD_STOP_S)
            raise
        runner = self.runner
        self.kv_spec, self.max_model_len = runner.kv.spec, runner.max_model_len
        self.model_digest, self.numerics = runner.model_digest, runner.numerics
        self.regions = tuple(map(region_of, runner.kv.caches))
        self.memory = self._measure(runner)
        log.info("a step may take %.0f s", self._step_timeout_s)

    async def open(self) -> EngineView:
        """Take the events of the engine thread on this loop."""
        assert self._thread is not None
        assert self._first_snapshot is not None
        view = self._view = EngineView(
            self._first_snapshot,
            self._thread.submit,
            step_timeout_s=self._step_timeout_s,
            prefix_caching=self.config.engine.enable_prefix_caching,
            peak_flops_per_s=self._peaks.flops_per_s,
            peak_bytes_per_s=self._peaks.bytes_per_s,
            isa=self.runner.isa,
            cores=torch.get_num_threads() * self.config.engine.ranks if self.kv.device.type == "cpu" else 0,
        )
        self._events.attach(view.on_step)
        return view

    async def take_role(self, role: common_pb2.Role) -> None:
        """Sum blocks from now on if the worker lends them, and take the role's limits."""
        assert self._view is not None
        self._view.submit(SetLending(role == common_pb2.ROLE_PREFILL))
        limits = self.config.engine.limits(self.kv.device.type, codec.role_from_wire(role).value)
        self._view.submit(SetBudget(limits.max_num_batched_tokens, limits.max_num_seqs))

    async def close(self) -> None:
        """Take no events any more."""
        self._events.detach()

    def stop(self, timeout_s: float) -> None:
        """End the engine thread after its current step."""
        if self._thread is None or self._thread.stop(timeout_s):
            self._events.close()
            self._end_ranks()
        else:  # the thread may still put events
            log.error("the engine thread did not stop within %.0f s", timeout_s)

    def describe(self) -> str:
        """Describe the kernels that compute."""
        return self.runner.describe()

    @property
    def runner(self) -> ModelRunner:
        """The model, once it is loaded."""
        assert self._runner is not None
        return self._runner

    @property
    def kv(self) -> KvPool:
        """The KV pool, which the engine writes."""
        return self.runner.kv

    def _measure(self, runner: ModelRunner) -> MemoryReport:
        """Measure the memory of this process before its first request."""
        kv, weights, step = runner.kv, runner.weights_bytes, self._step_bytes
        here = weights + step + kv.nbytes if kv.device.type == "cpu" else 0
        rest = max(0, resident_bytes() - here)
        blocks = kv.tokens // kv.spec.block_size
        held = kv.spec.held_tokens([cache.num_blocks for cache in kv.caches])
        return MemoryReport(weights, step, kv.nbytes, rest, blocks, kv.spec.block_size, runner.max_model_len, held)

    def _converts(self, engine: EngineConfig) -> int:
        """Return the bytes that staging may take. Decode workers stage, and those that may become one: they read from peers of
        any dtype."""
        spec = self.card.kv_layout(engine.block_size, engine.dtype, engine.kv_cache_dtype)
        decodes = self._role == common_pb2.ROLE_DECODE or not self.config.flip_obstacle
        return sum(map(most_staged_bytes, spec.groups)) if decodes else 0

    def make_transfer(self, worker_id: WorkerId, incarnation: Incarnation) -> TransferThread:
        """Make the thread that reads blocks of peers into the KV pool."""
        regions, caches = self.regions, self.kv.caches
        sums = {region: BlockSums(cache.blocks, beside=True) for region, cache in zip(regions, caches, strict=True)}
        return TransferThread(
            lambda: self._make_transport(worker_id, incarnation, regions),
            sum_blocks=sums if self.config.lease.kv_checksum else None,
        )

    def make_staging(self, transfer: TransferThread) -> Staging:
        """Make the blocks in which KV of another dtype is converted."""
        caches = self.kv.caches
        return Staging(
            transfer,
            # The memory is that of our KV group that holds the same. The ticket was checked, so there is one.
            lambda layout, count: StagedKv(layout, count, next(c for c in caches if c.layout.holds_the_same_as(layout))),
        )

    # Engine thread.

    def _build(self, directory: Path) -> tuple[Runner, Scheduler, BlockPools]:
        engine = self.config.engine
        check_before_loading(self.card, engine)
        later = self._converts(engine)
        runner = ModelRunner.load(directory, self.card, engine, later=later, progress=self._progress, on_lost=self._on_death)
        self._end_ranks = runner.close
        runner.numerics = numerics_of(runner, self.card, engine)
        self._preparing.join()  # it holds the interpreter, which would slow the steps that are measured now
        settled = settle(runner, engine, later=later)
        self._step_bytes = settled.step_bytes
        self._step_timeout_s = step_timeout_s(engine.step_timeout_s, settled.slowest_s)
        flops = StepFlops.of(ModelShape.of(self.card.spec)).chunk(0, settled.prompt_tokens)
        seen_flops_per_s = flops / settled.prompt_s
        self._peaks = peaks_of(runner.kv, engine, products=runner.products, seen_flops_per_s=seen_flops_per_s)
        caches = runner.kv.caches
        pool = BlockPools(*[cache.num_blocks for cache in caches], layouts=[cache.layout for cache in caches])
        limits = engine.largest_limits(runner.kv.device.type)
        scheduler = Scheduler(
            pool,
            engine.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            eos_token_ids=self.card.eos_token_ids,
            prefix_salt=runner.model_digest.encode() if engine.enable_prefix_caching else None,
            drafts_obstacle=runner.drafts_obstacle,
        )
        self._runner = runner
        scheduler.rates.add(settled.prompt_tokens, 0, settled.prompt_s)
        self._first_snapshot = EngineSnapshot(
            WorkerLoad(
                pool.counts(),
                prompt_tokens_per_s=scheduler.rates.prompt_tokens_per_s,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_num_seqs=scheduler.max_num_seqs,
            )
        )
        return runner, scheduler, pool

    def _sums_of(self) -> tuple[BlockSums, ...] | None:
        """Return a function for each KV group that sums its blocks. None: checksums are off."""
        if not self.config.lease.kv_checksum:
            return None
        return tuple(BlockSums(cache.blocks) for cache in self.kv.caches)

    def _counts_of(self) -> StepCounts:
        shape = ModelShape.of(self.card.spec)
        return StepCounts(StepFlops.of(shape), self.runner.traffic(shape), self.runner.expert_load)


def region_of(kv: KvCache) -> Region:
    """Return the region of the blocks of one KV group, which the transport registers and a ticket describes."""
    return Region(kv.address, kv.num_blocks, kv.layout.block_bytes, device_of(kv.blocks))


def device_of(memory: Tensor) -> TransferDevice:
    """Return the device of a tensor as the transport names it."""
    kind: DeviceKind = "cuda" if memory.device.type == "cuda" else "cpu"
    return TransferDevice(kind, memory.device.index or 0)


def most_staged_bytes(layout: KvGroup) -> int:
    """Return the bytes that staging takes in a worker with such a pool once peers of all other dtypes have come. Scales, which
    are a hundredth of the bytes, are left out."""
    numbers = layout.data_bytes * 8 // DTYPE_BITS[layout.dtype]
    bits = sum(DTYPE_BITS[dtype] for dtype in KV_DTYPES.values() if dtype != layout.dtype)
    return STAGING_BLOCKS * numbers * bits // 8


class StagedKv:
    """Staging blocks of a peer's layout, on the device of our pool. See `kvtransfer.staging.StagingBlocks`."""

    def __init__(self, layout: KvGroup, num_blocks: int, kv: KvCache) -> None:
        device = kv.device
        self._source, self._target = layout, kv.layout
        self._staged = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._sums = BlockSums(self._staged, beside=True)
        self._pool = kv.blocks
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # One block fits a CPU's cache, so the conversion of one block after the other is up to 5 times as fast (bf16 to int8).
        self._step = 1 if self._stream is None else num_blocks

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksums of these staging blocks, in order. Runs in the converter thread."""
        return self._sums(staged)

    @property
    def region(self) -> Region:
        """The region of the staging blocks."""
        staged = self._staged
        return Region(staged.data_ptr(), len(staged), self._source.block_bytes, device_of(staged))

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Convert staging blocks into the `local` blocks of the pool, and write no others. Return when all are written.

        The blocks hold `tokens` tokens; all are full except the last. Runs in the converter thread.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # a stream of None changes nothing
            for first in range(0, len(staged), self._step):
                ours, theirs = list(local[first : first + self._step]), list(staged[first : first + self._step])
                left = min(tokens - first * self._source.block_size, len(theirs) * self._source.block_size)
                self._pool[ours] = convert_blocks(self._staged[theirs], self._source, self._target, left)
        if self._stream is not None:
            self._stream.synchronize()
