"""The files that a model's directory must hold, and the weight files among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pdserve.checkpoint.shards import INDEX, SINGLE
from pdserve.core.errors import ConfigError

REQUIRED: Final = ("config.json", "tokenizer.json")


def check_directory(directory: Path, *, weights: bool = True) -> None:
    """Raise `ConfigError` that names every missing file. `weights`: the files of weights must be there, too."""
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    files = weight_files(directory) if weights else ()
    if weights and not files:
        missing.append(f"{SINGLE} (or {INDEX} and its files)")
    missing += [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError(f"{directory} is not a model directory in Hugging Face layout: it lacks {', '.join(missing)}")


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files that hold the weights, sorted; empty when there are none.

    An index lists them, and they need not exist. Without an index, they are all *.safetensors of the directory.
    Raises `ConfigError` for an index that cannot be read.
    """
    index = directory / INDEX
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ConfigError(f"{index} lacks weight_map")
        if not all(isinstance(name, str) for name in listed.values()):
            raise ConfigError(f"{index}: weight_map holds a value that is not a file name")
        return tuple(directory / name for name in sorted(set(listed.values())))
    return tuple(sorted(directory.glob("*.safetensors")))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ConfigError` when the file cannot be read or holds something else. A pipe or a device is not
    read, since it may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"cannot read {path}: it is no regular file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
