"""The drafters of an engine, as its settings ask for them, with the measured times of its steps."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, SpeculativeConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.drafting.api import ModelDrafter
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.drafting.costs import StepCosts, measure
from pdserve.engine.drafting.forced import ForcedDrafter
from pdserve.engine.drafting.lookup import LookupDrafter
from pdserve.engine.drafting.models import ModelDraft, SelfDrafter
from pdserve.engine.kv.paged import TORCH_DTYPES
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.memory.host import touch
from pdserve.engine.models.choice import make_model
from pdserve.engine.models.native_decoder import NativeDecoder
from pdserve.engine.runner import ModelRunner

log = logging.getLogger(__name__)

SHARE_OF_KV: Final = 4
"""Divisor: a draft model has a KV pool of 1 / SHARE_OF_KV of the bytes of the large model's. A token of a smaller model takes
about a tenth."""


def make_choice(directory: Path, card: ModelCard, config: EngineConfig, runner: ModelRunner) -> DraftChoice | None:
    """Load what drafts the tokens of a runner, whose pool nothing uses yet, and measure its steps. None: nothing drafts.

    Raises `ConfigError` for a method that does not run here.
    """
    how = config.speculative_config
    if not how.drafts:
        return None
    if runner.drafts_obstacle is not None:
        raise ConfigError(
            f"speculative_config.method is {how.method}, and this engine takes no drafts: {runner.drafts_obstacle}"
        )
    lookup = LookupDrafter(least=how.prompt_lookup_min, longest=how.prompt_lookup_max, recent=how.method != "ngram")
    model: ModelDrafter | None = None
    if how.method == "self":
        model = _self_drafter(directory, card, config, runner)
    elif how.method == "draft_model":
        model = _draft_model(card, config, runner)
    costs = _measured(runner, config)
    log.info("speculative decoding by %s: %s", how.method, costs)
    return DraftChoice((ForcedDrafter(), lookup), costs, most=how.most_tokens, model=model)


def _measured(runner: ModelRunner, config: EngineConfig) -> StepCosts:
    spec, limits = runner.kv.spec, config.largest_limits(runner.kv.device.type)
    return measure(
        runner.execute, groups=len(spec.groups), block_size=spec.block_size, num_blocks=runner.kv.num_blocks,
        most_rows=limits.max_num_seqs + config.speculative_config.most_rows, max_model_len=runner.max_model_len,
        clock=time.thread_time if runner.compiled and torch.get_num_threads() == 1 else time.perf_counter,
    )  # fmt: skip


def _self_drafter(directory: Path, card: ModelCard, config: EngineConfig, runner: ModelRunner) -> SelfDrafter:
    how, bits = config.speculative_config, config.speculative_config.quantization or "int4"
    if not runner.compiled:
        raise ConfigError(f"speculative_config.method self needs compiled steps, and torch computes: {runner.describe()}")
    layers = len(card.spec.layers)
    if how.draft_layers is None and config.quantization == bits:
        raise ConfigError(
            f"speculative_config.method self drafts with weights in {bits}, which the model has itself: use suffix, or set "
            "speculative_config.draft_layers"
        )
    if how.draft_layers is not None and how.draft_layers >= layers:
        raise ConfigError(f"speculative_config.draft_layers must be below the model's {layers} layers, got {how.draft_layers}")
    dtype = TORCH_DTYPES[resolve_dtype(config.dtype)]
    weights = stream_weights(directory, card, dtype, runner.kv.device, load_format=config.load_format)
    model = make_model(card.spec, weights, runner.kv, replace(config, quantization=bits), runner.max_model_len)
    assert isinstance(model, NativeDecoder), "the runner is compiled, so its copy is"
    if how.draft_layers is not None:
        model.compute_layers(how.draft_layers)
    copy = ModelRunner(
        model, runner.kv, weights_bytes=0, max_model_len=runner.max_model_len, batch_invariant=False, why="it drafts"
    )
    kind = f"self {bits}" if how.draft_layers is None else f"self {bits} {how.draft_layers}"
    return SelfDrafter(copy.execute, runner.kv, _measured(copy, config), kind, how.most_places)


def _draft_model(card: ModelCard, config: EngineConfig, runner: ModelRunner) -> ModelDraft:
    how = config.speculative_config
    if runner.kv.device.type == "cuda" and config.kv_cache_memory is None:
        raise ConfigError(
            "speculative_config.method draft_model takes memory of the GPU that the KV pool does not leave: set kv_cache_memory"
        )
    directory = resolve(how.model)
    small = ModelCard.load(directory)
    if small.vocab_size != card.vocab_size:
        raise ConfigError(
            f"speculative_config.model {how.model} has {small.vocab_size} token ids, and the model has {card.vocab_size}"
        )
    engine = replace(
        config, model=how.model, model_family=None, load_format="auto", quantization=how.quantization, kv_cache_dtype="auto",
        kv_cache_memory=max(config.cpu_kv_bytes // SHARE_OF_KV, 1), max_model_len=None, speculative_config=SpeculativeConfig(),
    )  # fmt: skip
    own = ModelRunner.load(directory, small, engine)
    costs = _measured(own, engine)
    for cache in own.kv.caches:
        if own.kv.device.type == "cpu":
            touch(cache.address, cache.nbytes)
    return ModelDraft(
        own.execute, costs, num_blocks=own.kv.num_blocks, block_size=engine.block_size, groups=len(own.kv.spec.groups),
        longest=own.max_model_len, most=how.most_places,
    )  # fmt: skip
