"""Loading of an engine's model, and execution of the scheduler's steps. A worker's engine thread owns the runner."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.checkpoint.fingerprint import model_digest
from pdserve.checkpoint.progress import Progress, silent
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, OutOfMemory
from pdserve.core.kv_layout import DTYPE_BITS, fit_max_model_len
from pdserve.core.roofline import ModelShape, StepTraffic
from pdserve.core.shards import shares_of_rank
from pdserve.core.step_plan import Sampled, StepPlan, accept
from pdserve.core.worker import ExpertLoad, expert_load
from pdserve.engine.attention.bounded import MOST_POSITIONS
from pdserve.engine.gang.leader import Gang, OnLost
from pdserve.engine.gang.line import RankLine
from pdserve.engine.gang.rank import RankService
from pdserve.engine.kv.cache import zeros
from pdserve.engine.kv.paged import TORCH_DTYPES
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.loading.source import TensorSource
from pdserve.engine.memory.device import PoolMeasure, is_memory_error
from pdserve.engine.memory.host import return_freed_memory
from pdserve.engine.memory.largest_steps import StepLimits, largest_steps, prompt_step
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.api import Model
from pdserve.engine.models.choice import check_compiled_ranks, check_gpus, check_ranks, make_model
from pdserve.engine.models.weights import WeightSource
from pdserve.engine.native import library
from pdserve.engine.sampler import MaskThread, all_greedy, best_ids, sample

CPU_PROMPT_TOKENS: Final = 128
"""The number of tokens that shows the speed at which a CPU computes prompts. 512 tokens take four times as long and show the
same speed."""
ReadWeights = Callable[[torch.dtype, torch.device], WeightSource]


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A step that was launched. Only `ModelRunner.collect` reads its fields.

    best: [rows] int64 on the CPU, the tokens of a step of plainly greedy rows, once `written` has passed; None: `drawn` holds
    the tokens. written: the event after the step's last work on the device; None: nothing is pending.
    """

    plan: StepPlan
    drawn: list[Sampled]
    best: Tensor | None = None
    written: torch.cuda.Event | None = None


class ModelRunner:
    """The model and the KV pool of one engine, made by `load`. The whole pool is allocated at once, and it never grows."""

    def __init__(
        self,
        model: Model,
        kv: KvPool,
        *,
        weights_bytes: int,
        max_model_len: int,
        batch_invariant: bool,
        why: str,
        gang: Gang | None = None,
    ) -> None:
        """Hold a model and its pool. why: the reason, in words, why this kind of model was chosen. gang: the other ranks."""
        self.kv = kv
        self._gang = gang
        self.compiled = isinstance(model, native.NativeDecoder)
        self.isa = model.isa if isinstance(model, native.NativeDecoder) else ""
        """The instruction set of compiled steps, as `PDSERVE_ISA` names it. Empty: torch computes."""
        self.batch_invariant = batch_invariant or (self.compiled and not kv.spec.quantised)
        """True when a token's logits depend only on its sequence, bit for bit. The setting asks for it, or the compiled model
        has this property at no cost."""
        self.weights_bytes = weights_bytes
        """Bytes of the checkpoint's tensors in the model's dtype. The copy of a tied head for its kernel is not counted."""
        self.model_digest = ""
        """The name of the model with every byte of its weights. Empty: the weights do not come from files."""
        self.numerics = ""
        """The name of the bits that this engine computes, see `numerics_of`. Empty: it has none, or nobody has asked."""
        self.max_model_len = max_model_len
        self.drafts_obstacle = model.drafts_obstacle if isinstance(model, native.NativeDecoder) else None
        """The reason, in words, why steps cannot take drafts; None when they can."""
        self._on_cuda = kv.device.type == "cuda"
        self._quantised = kv.spec.quantised
        self._masks = MaskThread()
        self._model = model
        self._why = why

    def largest_steps(self, config: EngineConfig) -> tuple[StepPlan, ...]:
        """Return steps that together need at least as much memory as any step. Execute them only while the pool is unused."""
        limits = self._limits(config)
        if not isinstance(self._model, native.NativeDecoder):
            return largest_steps(limits, gathered=MOST_POSITIONS, decode_batches=())
        batches = {size for group in self.kv.spec.groups for size in native.split_batches(group.num_kv_heads)}
        return largest_steps(limits, gathered=0, decode_batches=tuple(sorted(batches)))

    def prompt_step(self, config: EngineConfig) -> StepPlan:
        """Return a step of one prompt that shows at which speed prompts are computed.

        On a GPU, it has as many tokens of a prompt as a step may have. Execute it only while the pool is unused.
        """
        return prompt_step(self._limits(config), None if self._on_cuda else CPU_PROMPT_TOKENS)

    def _limits(self, config: EngineConfig) -> StepLimits:
        spec, sizes = self.kv.spec, config.largest_limits(self.kv.device.type)
        windows = tuple(sorted({group.window for group in spec.groups if group.window is not None}))
        drafts = config.speculative_config.most_rows
        return StepLimits(self.kv.num_blocks, spec.block_size, *sizes, self.max_model_len, len(spec.groups), windows, drafts)

    @classmethod
    def load(
        cls,
        directory: Path,
        card: ModelCard,
        config: EngineConfig,
        *,
        later: int = 0,
        progress: Progress = silent,
        on_lost: OnLost = lambda _: None,
        service: RankService | None = None,
    ) -> ModelRunner:
        """Load the weights of `directory` and allocate the KV pool. Sets torch's number of threads for the whole process.

        With degrees above 1 the runner is rank 0 of a gang, whose other ranks it starts. `on_lost` is called in another thread
        when one of them ends; no step can be computed then. `close` ends them. service: serves the lines of ranks that have
        memory of their own (`lines`).

        `later`: bytes of the device's memory that users other than the engine may take; a measured pool leaves them free.
        `progress` gets the bytes that are read. Raises `ConfigError` naming the setting or the tensor that does not fit.
        """

        sources: list[TensorSource] = []  # not the weights: these would keep the embedding twice

        def read(dtype: torch.dtype, device: torch.device) -> WeightSource:
            streamed = stream_weights(directory, card, dtype, device, load_format=config.load_format, progress=progress)
            sources.append(streamed.source)
            alone = config.degrees.ranks == 1  # and then a trial lays a GPU's weights out twice
            return streamed.held() if device.type == "cuda" and alone else streamed

        gang = None
        if config.degrees.ranks > 1:
            if device_of(config.device).type == "cuda":
                config.check_gang_on_gpus(f"device is {config.device}")
                check_gpus(config, torch.cuda.device_count())
            gang = Gang(on_lost, service)
        try:
            runner = cls.make(card, config, read, later=later, gang=gang, directory=directory)
            if gang is not None:
                gang.wait_ready()
        except BaseException:
            if gang is not None:
                gang.close()
            raise
        runner.model_digest = model_digest(card.fingerprint, card.eos_token_ids, sources[-1].digest())
        return runner

    @classmethod
    def make(
        cls,
        card: ModelCard,
        config: EngineConfig,
        read: ReadWeights,
        *,
        later: int = 0,
        gang: Gang | None = None,
        directory: Path = Path(),
    ) -> ModelRunner:
        """Make a runner as `load` does, with the weights that `read` returns. The ranks of a gang read those of `directory`."""
        if config.threads > 0:
            torch.set_num_threads(config.threads)
        device = device_of(config.device)
        with torch.inference_mode():
            runner = cls._sized(card, config, device, read, later, gang, directory)
        return_freed_memory()  # it held the weights as they were read
        return runner

    @classmethod
    def _sized(
        cls,
        card: ModelCard,
        config: EngineConfig,
        device: torch.device,
        read: ReadWeights,
        later: int,
        gang: Gang | None,
        directory: Path,
    ) -> ModelRunner:
        """Make a runner whose pool has the configured size, or the size that fits beside the weights and the largest step."""
        measure = PoolMeasure.of(device, config, later)
        weights = read(TORCH_DTYPES[resolve_dtype(config.dtype)], device)
        if measure is None:
            return cls._on_pool(card, config, device, weights, config.cpu_kv_bytes, gang=gang, directory=directory)

        def trial(kv_bytes: int) -> list[Callable[[], object]]:
            runner = cls._on_pool(card, config, device, weights, kv_bytes, pool_tokens=card.max_position)
            return [partial(runner.execute, plan) for plan in runner.largest_steps(config)]

        block_bytes = card.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype).block_bytes
        return cls._on_pool(card, config, device, weights, measure.pool_bytes(config, block_bytes, trial))

    @classmethod
    def _on_pool(
        cls,
        card: ModelCard,
        config: EngineConfig,
        device: torch.device,
        weights: WeightSource,
        kv_bytes: int,
        pool_tokens: int | None = None,
        *,
        gang: Gang | None = None,
        directory: Path = Path(),
    ) -> ModelRunner:
        """Make a runner with a pool of `kv_bytes`.

        pool_tokens: the number of tokens that limits max_model_len; None means the longest sequence that the pool takes.
        """
        with torch.inference_mode(False):  # the pool is an ordinary tensor, which other code may change
            spec = card.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
            most = [group.most_useful(*config.largest_limits(device.type)) for group in spec.groups]
            own = gang is None or config.collective(device.type) != "shared_memory"
            allocate = zeros if gang is None or own else gang.allocate
            shares = shares_of_rank(card.spec, config.degrees, spec, 0) if own else ()
            dtype = TORCH_DTYPES[resolve_dtype(config.dtype)]
            kv = KvPool(spec, kv_bytes, device, dtype, most=most, allocate=allocate, shares=shares)
        max_model_len = fit_max_model_len(config.max_model_len, card.max_position, pool_tokens or kv.longest)
        if gang is not None:
            compiled = native.supports(card.spec, kv)
            if compiled:
                check_compiled_ranks(card.spec, config)
            else:
                check_ranks(card.spec, kv, config)
            gang.start(directory, card, config, max_model_len, kv_bytes, compiled=compiled, device=device.type)
        try:
            if gang is not None:
                model: Model = gang.model(weights, kv)
            else:
                model = make_model(card.spec, weights, kv, config, max_model_len)
        except MemoryError as exc:
            raise ConfigError("not enough memory to lay the model's weights out for the compiled code") from exc
        invariant = bool(config.batch_invariant)
        why = native.obstacle(card.spec, kv) or library.find().why
        return cls(
            model, kv, weights_bytes=weights.nbytes, max_model_len=max_model_len, batch_invariant=invariant, why=why, gang=gang
        )

    def lines(self, number: int) -> dict[int, RankLine]:
        """Return one of the lines of each other rank of a gang whose ranks have memory of their own."""
        return {} if self._gang is None else self._gang.lines(number)

    def close(self) -> None:
        """End the other ranks of a gang. Idempotent."""
        if self._gang is not None:
            self._gang.close()

    def traffic(self, shape: ModelShape) -> StepTraffic:
        """Return the bytes that decode steps of a model of this shape read, in the formats of this engine."""
        kv_bits = DTYPE_BITS[self.kv.spec.groups[0].dtype]
        if isinstance(self._model, native.NativeDecoder):
            scheme = self._model.scheme
            weight_bits, head_bits = scheme.bits + scheme.scale_bits, scheme.head_bits
        else:
            weight_bits = head_bits = self.kv.dtype.itemsize * 8
        return StepTraffic.of(shape, weight_bits=weight_bits, head_bits=head_bits, kv_bits=kv_bits)

    @property
    def products(self) -> torch.dtype:
        """The dtype of the numbers that are multiplied with each other in most products."""
        return self._model.scheme.products if isinstance(self._model, native.NativeDecoder) else self.kv.dtype

    def expert_load(self) -> ExpertLoad | None:
        """Return the spread of all tokens so far over the model's experts. Only the thread that executes steps may call it."""
        return expert_load(self._model.expert_counts())

    def describe(self) -> str:
        """Return a line for logs and operators that says how steps are computed and why."""
        way = f"{self._model.way} {str(self.kv.dtype).removeprefix('torch.')}"
        ranks = "" if self._gang is None else f"; {self._gang}"
        return f"{way} ({self._why}){ranks}; batch-invariant: {'yes' if self.batch_invariant else 'no'}"

    def launch(self, plan: StepPlan) -> Pending:
        """Start the step of a plan: it computes the plan, writes its KV, and draws a token for each of its samples.

        On a CPU nothing is pending: the step is done when this returns. On a GPU the step is queued. If all rows are plainly
        greedy, or no row draws a token, this method does not wait for the step; otherwise it waits for the step's draws.
        `collect` must follow before the next launch. Raises `OutOfMemory` or `OutOfThreads`, as `collect` does; the KV that the
        step has written by then is unusable.
        """
        if not plan.slices:
            return Pending(plan, [])
        try:
            if not self._model.computes_in_torch:
                return self._launch(plan)
            with torch.inference_mode():
                return self._launch(plan)
        except (MemoryError, RuntimeError) as exc:
            _raise_out_of_memory(exc, plan)
            raise

    def _launch(self, plan: StepPlan) -> Pending:
        specs = plan.specs  # taken now, while they are in the CPU's caches
        with self._masks.computing(specs):
            greedy = all_greedy(specs)
            logits = self._model.forward(plan, plan.sampled_rows, best_alone=greedy)
        drawn: list[Sampled] = []
        best: Tensor | None = None
        if logits is not None and self._on_cuda and greedy:
            best = best_ids(logits.values).to("cpu", non_blocking=True)  # into pinned memory, so the copy is queued as well
        elif logits is not None and greedy and logits.best is not None:
            drawn = list(zip(logits.best, repeat(None)))
        elif logits is not None:
            drawn = sample(logits.values, specs, logits.best, logits.sample)
        if not self._on_cuda:
            return Pending(plan, drawn)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
        return Pending(plan, drawn, best, written)

    def collect(self, pending: Pending) -> list[Sampled]:
        """Wait until the step is done and its KV is written, and return its tokens, one for each sample, in plan order.

        Raises `OutOfMemory` or `OutOfThreads`, for work that had only been queued.
        """
        drawn = pending.drawn
        try:
            if pending.written is not None:
                pending.written.synchronize()
            if pending.best is not None:
                drawn = [(token_id, None) for token_id in pending.best.tolist()]
            if self._quantised:
                self._settle_drafts(pending.plan, drawn)
        except (MemoryError, RuntimeError) as exc:
            _raise_out_of_memory(exc, pending.plan)
            raise
        return drawn

    def _settle_drafts(self, plan: StepPlan, drawn: list[Sampled]) -> None:
        """Take back what rejected drafts changed in quantised blocks: a larger number raises the scale of a block for good."""
        counts, rejected, at = [1] * plan.decodes, False, plan.decodes
        for piece in plan.slices[plan.decodes :]:
            end = at + len(piece.samples)
            counts.append(len(accept(piece.drafts, drawn[at:end])) if piece.drafts else 1)
            rejected |= bool(piece.drafts) and counts[-1] < end - at
            at = end
        if not rejected:
            return
        self._model.settle_drafts(counts)
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Launch a plan and collect its tokens at once, for callers without other work in between."""
        return self.collect(self.launch(plan))

    def take_memory(self, plan: StepPlan) -> None:
        """Take the memory that a plan's step needs, and keep it where the backend does. The step computes meaningless KV.

        Compiled code takes the memory of all layers before it computes the first layer, so it stops after this layer.
        """
        with self._model.first_layer_alone() if isinstance(self._model, native.NativeDecoder) else nullcontext():
            self.execute(plan)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute the plan, write its KV, and return the logits of all its tokens: [plan.num_tokens, vocab] float32."""
        logits = self._model.forward(plan, list(range(plan.num_tokens)))
        assert logits is not None
        return logits.values.clone()


def _raise_out_of_memory(exc: BaseException, plan: StepPlan) -> None:
    """Raise `OutOfMemory` if an exception of this plan's step means that memory ran out."""
    if is_memory_error(exc):
        raise OutOfMemory(f"a step of {plan.num_tokens} tokens of {len(plan.slices)} sequences got no memory") from exc


def _why_no_cuda() -> str:
    """Return advice for a machine whose GPU cannot be used: what to check, and how to work without a GPU."""
    without = "or compute on the CPU (--gpus 0, or num_gpus 0 and device cpu)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install one with it, {without}"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        f"CUDA_VISIBLE_DEVICES is {'not set' if shown is None else repr(shown)}; see what `nvidia-smi` says there, and whether "
        f"its driver knows CUDA {torch.version.cuda}, {without}"
    )


def device_of(name: str) -> torch.device:
    """Return the device for the setting `device`: cpu, cuda or auto. Raises `ConfigError` for cuda when there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is cuda, but torch sees no CUDA device on {socket.gethostname()}: {_why_no_cuda()}")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
