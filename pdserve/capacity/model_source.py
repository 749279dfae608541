"""The model that an operator names: a published name, a directory, a GGUF file, or a Hugging Face id.

Only the configuration is read, never the weights.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pdserve.capacity.published import PublishedModel, read_model
from pdserve.checkpoint import hub, tiny
from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.model import GgufModel
from pdserve.checkpoint.layout import read_json
from pdserve.checkpoint.resolve import DEFAULT, resolve
from pdserve.core.errors import ConfigError


@functools.cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the models that are known by name: each with its `config` and its `source`.

    refused: the reason why `pdserve up` refuses the published checkpoint, for an entry with such a reason.
    """
    text = (resources.files("pdserve.capacity") / "data" / "models.json").read_text(encoding="utf-8")
    found: dict[str, Mapping[str, Any]] = json.loads(text)
    return found


def published_model(model: str) -> Mapping[str, Any] | None:
    """Return the entry of a published name, in upper or lower case. None: the name is unknown, or names a path that exists."""
    return None if os.path.exists(os.path.expanduser(model)) else published_models().get(model.lower())


def find_model(model: str, num_kv_heads: int | None = None) -> PublishedModel:
    """Return the model of a name, a directory with config.json, a .gguf file or a Hugging Face id ORG/NAME.

    An existing path wins over a name of the same spelling. num_kv_heads: see `read_model`. Raises `ConfigError` that names
    what is missing, and lists the known names for an unknown one.
    """
    return read_model(model, _config(model), num_kv_heads)


def _config(model: str) -> Mapping[str, Any]:
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as exc:  # no permission, a name that is too long or holds a NUL, an unknown home
        raise ConfigError(f"cannot look for --model {model!r:.60}: {exc}") from exc
    if model in (DEFAULT, tiny.NAME):
        return read_json(resolve(model) / "config.json")
    if is_directory:
        return read_json(path / "config.json")
    if is_file and path.suffix.lower() == ".gguf":
        return GgufModel(GgufFile(path)).config()
    published = published_model(model)
    if published is not None:
        config: Mapping[str, Any] = published["config"]
        return config
    if model.count("/") == 1 and not model.startswith((".", "/", "~")) and not is_file:
        return read_json(hub.download(model, only=("config.json",)) / "config.json")
    raise ConfigError(
        f"--model {model!r:.60} is not known: it must be a directory with config.json, a .gguf file, a Hugging Face id "
        f"ORG/NAME, {DEFAULT}, {tiny.NAME}, or one of {', '.join(published_models())}"
    )
