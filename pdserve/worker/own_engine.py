"""pdserve's own engine as a worker's process runs it: the engine thread with the model, its KV pool and its transport."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from kvtransfer.api import AnyRegion, Region, Transport
from kvtransfer.backends.registry import prepare
from kvtransfer.remote import RemoteTransport, TransportSettings
from kvtransfer.routed import RoutedTransport, rank_id
from kvtransfer.staging import Staging
from kvtransfer.thread import TransferThread
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.progress import Progress
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import SumBlocks
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.roofline import ModelShape, StepCounts, StepFlops
from pdserve.core.worker import WorkerLoad
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.drafting.setup import make_choice
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
from pdserve.worker.kv_memory import WorkerKv, most_staged_bytes
from pdserve.worker.messages import EngineSnapshot, SetBudget, SetLending, StepEvents
from pdserve.worker.rank_service import MEMORY, RANK_SERVICE, READS
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
        self._choice: DraftChoice | None = None
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
        choice = lambda: self._choice  # noqa: E731
        self._thread = EngineThread(build, self._events.put, self._on_death, self._sums_of, self._counts_of, choice)
        try:
            self._thread.start(self.config.start_timeout_s)
        except BaseException:
            self.stop(FAILED_LOAD_STOP_S)
            raise
        runner = self.runner
        self.kv_spec, self.max_model_len = runner.kv.spec, runner.max_model_len
        self.model_digest, self.numerics = runner.model_digest, runner.numerics
        self.regions = self._kv.regions
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
        pool = sum(region.num_blocks * region.block_bytes for region in self.regions)  # of all ranks, like the blocks
        return MemoryReport(weights, step, pool, rest, blocks, kv.spec.block_size, runner.max_model_len, held)

    def _converts(self, engine: EngineConfig) -> int:
        """Return the bytes that staging may take. Decode workers stage, and those that may become one: they read from peers of
        any dtype."""
        spec = self.card.kv_layout(engine.block_size, engine.dtype, engine.kv_cache_dtype)
        decodes = self._role == common_pb2.ROLE_DECODE or not self.config.flip_obstacle
        return sum(map(most_staged_bytes, spec.groups)) if decodes else 0

    def make_transfer(self, worker_id: WorkerId, incarnation: Incarnation) -> TransferThread:
        """Make the thread that reads blocks of peers into the KV pool."""
        sums: dict[AnyRegion, SumBlocks] = {
            region: self._kv.sums_of(group, beside=True) for group, region in enumerate(self.regions)
        }
        return TransferThread(
            lambda: self._routed(worker_id, incarnation), sum_blocks=sums if self.config.lease.kv_checksum else None
        )

    def make_staging(self, transfer: TransferThread) -> Staging:
        """Make the blocks in which KV of another dtype is converted."""
        return Staging(transfer, self._kv.stage)

    def _routed(self, worker_id: WorkerId, incarnation: Incarnation) -> RoutedTransport:
        """Make the transport of one life, with those of all ranks that have KV. Runs in the transfer thread."""
        config, ranks = self.config, dict[int, Transport[Region]]()
        for rank, line in self.runner.lines(READS).items():
            if regions := self._kv.regions_of(rank):
                names = TransportSettings(
                    self.transport, config.host, config.allow_public_bind, worker_id, rank_id(incarnation, rank)
                )
                ranks[rank] = RemoteTransport(line, regions, names)
        if regions := self._kv.regions_of(0):
            ranks[0] = self._make_transport(worker_id, incarnation, regions)
        return RoutedTransport(ranks)

    # Engine thread.

    def _build(self, directory: Path) -> tuple[Runner, Scheduler, BlockPools]:
        engine = self.config.engine
        check_before_loading(self.card, engine)
        later = self._converts(engine)
        runner = ModelRunner.load(
            directory, self.card, engine,
            later=later, progress=self._progress, on_lost=self._on_death, service=RANK_SERVICE,
        )  # fmt: skip
        self._end_ranks = runner.close
        self._kv = WorkerKv(runner.kv, runner.lines(MEMORY))
        runner.numerics = numerics_of(runner, self.card, engine)
        self._preparing.join()  # it holds the interpreter, which would slow the steps that are measured now
        self._choice = make_choice(directory, self.card, engine, runner)
        settled = settle(runner, engine, later=later)
        self._step_bytes = settled.step_bytes
        self._step_timeout_s = step_timeout_s(engine.step_timeout_s, settled.slowest_s)
        flops = StepFlops.of(ModelShape.of(self.card.spec)).chunk(0, settled.prompt_tokens)
        seen_flops_per_s = flops / settled.prompt_s
        self._peaks = peaks_of(runner.kv, engine, products=runner.products, seen_flops_per_s=seen_flops_per_s)
        caches = runner.kv.caches
        pool = BlockPools(*[cache.num_blocks for cache in caches], layouts=runner.kv.spec.groups)
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
            max_drafts=engine.speculative_config.most_rows,
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

    def _sums_of(self) -> tuple[SumBlocks, ...] | None:
        """Return a function for each KV group that sums its blocks. None: checksums are off."""
        if not self.config.lease.kv_checksum:
            return None
        return tuple(self._kv.sums_of(group, beside=False) for group, _ in enumerate(self._kv.regions))

    def _counts_of(self) -> StepCounts:
        shape = ModelShape.of(self.card.spec)
        return StepCounts(StepFlops.of(shape), self.runner.traffic(shape), self.runner.expert_load)
