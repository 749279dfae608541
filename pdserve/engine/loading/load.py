"""The weights of a model's directory, by the setting `load_format`."""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.progress import Progress, silent
from pdserve.config import LoadFormat
from pdserve.engine.loading.dummy import DummyTensors
from pdserve.engine.loading.files import CheckpointFiles
from pdserve.engine.loading.source import TensorSource
from pdserve.engine.loading.streamed import StreamedWeights
from pdserve.engine.models.weights import ModelWeights


def stream_weights(
    directory: Path,
    card: ModelCard,
    dtype: torch.dtype,
    device: torch.device,
    *,
    load_format: LoadFormat = "auto",
    progress: Progress = silent,
) -> StreamedWeights:
    """Check the weights of a checkpoint in `directory`, and return them so that they are read when they are taken.

    Raises `ConfigError` naming missing, unexpected and misshapen tensors, tensors of a dtype that is not read, or the file that
    cannot be read.
    """
    names, spec = card.tensors, card.spec
    source: TensorSource
    if load_format == "dummy":
        layers = range(len(spec.layers))
        norms = {names.norm, *(names.of(part, layer) for part in names.layer if part.endswith("norm") for layer in layers)}
        source = DummyTensors(norms, offset=spec.norm.offset)
    else:
        unread = (names.head,) if spec.tied_head else ()
        source = CheckpointFiles(directory, names.shapes(spec), unread=unread, ignores=lambda name: names.ignores(name, spec))
    return StreamedWeights(names, spec, source, dtype, device, progress)


def load_weights(directory: Path, card: ModelCard, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read all weights of a checkpoint into memory. Raises what `stream_weights` raises."""
    return stream_weights(directory, card, dtype, device).held()
