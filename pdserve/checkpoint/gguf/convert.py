"""The conversion of a GGUF file to a directory in Hugging Face layout, dequantised to float32.

Reading SmolLM2-135M takes 2 s and dequantising it 1.3 s, while its safetensors copy (538 MB) loads in 0.05-0.3 s. So a
file is converted once (see `resolve`), and the engine knows only one format.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.model import GgufModel
from pdserve.checkpoint.gguf.tokenizer import write_tokenizer
from pdserve.checkpoint.origin import write_origin
from pdserve.checkpoint.progress import Progress, silent
from pdserve.checkpoint.shards import size_bytes, write_shards
from pdserve.core.errors import ConfigError

CONVERTER_VERSION: Final = 2  # raise it when the converter's output changes, so that old copies are not used any more

_QUANTISATION_SUFFIX: Final = re.compile(r"[.\-_](?:IQ|Q|TQ)\d\w*$|[.\-_](?:BF|F|FP)(?:16|32)$", re.IGNORECASE)


def convert(source: Path, directory: Path, progress: Progress = silent) -> None:
    """Convert the file `source` into the empty `directory`.

    Raises `ConfigError` for an architecture, a tokenizer, a setting or a tensor that is not known.
    """
    progress("reading " + source.name, 0, 1)
    gguf = GgufFile(source)
    try:
        _convert(gguf, directory, progress)
    except (ArithmeticError, LookupError, TypeError, ValueError) as exc:  # values of the file contradict each other
        raise ConfigError(f"{source} does not fit together: {type(exc).__name__}: {exc}") from exc


def _convert(gguf: GgufFile, directory: Path, progress: Progress) -> None:
    model = GgufModel(gguf)
    config, names = model.config(), model.tensor_names()
    # The tokens that end a text, a turn and a message can differ; each ends a request.
    eos = {gguf.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    generation = {"bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"), "eos_token_id": sorted(eos)}

    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation)
    write_tokenizer(gguf, directory, config["max_position_embeddings"])
    _write_weights(gguf, model, names, directory, progress)
    write_origin(directory, name=model_name(gguf.path), source=gguf.path.name)


def model_name(source: Path) -> str:
    """Return the name by which clients call the model: the file's name without extension and quantisation."""
    return _QUANTISATION_SUFFIX.sub("", source.stem) or source.stem


def _write_weights(gguf: GgufFile, model: GgufModel, names: dict[str, str], directory: Path, progress: Progress) -> None:
    shapes = {hf: gguf.shape(name) for hf, name in names.items()}
    total = sum(size_bytes(shape) for shape in shapes.values())
    written = 0

    def done(count: int) -> None:
        nonlocal written
        written += count
        progress("converting " + gguf.path.name, written, total)

    write_shards(directory, shapes, lambda hf: model.tensor(names[hf]), done)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
