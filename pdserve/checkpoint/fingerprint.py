"""The two names of a model: its fingerprint, which costs nothing, and its digest, which covers every byte.

The **fingerprint** covers config.json, tokenizer.json, and the size, the header (names, dtypes, shapes, offsets) and a few
samples of each weight file. It does not cover paths, names or times, and reads at most 64 KiB of each file's values. By the
fingerprint, a router, which loads no weights, tells whether a worker was started with the right model. Two fine-tunes that
differ in a few bytes may have one fingerprint.

The **digest** covers all weights as well. Only a worker that has loaded the weights knows the digest. By the digest, workers
tell whether their KV comes from the same model ([0071](docs/design/0071-identities.md)).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pdserve.checkpoint.layout import weight_files
from pdserve.core.block_hash import encode_parts
from pdserve.core.errors import ConfigError

_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
_DUMMY: Final = b"dummy weights 1"  # raise the number when the made-up numbers change
_VOLATILE: Final = frozenset({"_name_or_path", "transformers_version"})


def fingerprint(directory: Path, config: Mapping[str, Any], *, dummy: bool = False) -> str:
    """Return 32 hex digits. Raises `ConfigError` when a weight file or the tokenizer cannot be read.

    dummy: the weights are made up, so no file of weights is read, and the result never equals the fingerprint of the model
    itself.
    """
    digest = hashlib.sha256()
    stable = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(stable, sort_keys=True).encode())
    try:
        digest.update(hashlib.sha256((directory / "tokenizer.json").read_bytes()).digest())
        for path in () if dummy else weight_files(directory):
            digest.update(_weights(path))
    except OSError as exc:
        raise ConfigError(f"cannot read {exc.filename}: {exc.strerror}") from exc
    if dummy:
        digest.update(_DUMMY)
    return digest.hexdigest()[:32]


def model_digest(fingerprint: str, eos_token_ids: Sequence[int], weights: str) -> str:
    """Return the digest of a model, 64 hex digits. `weights` is the digest of its tensors.

    The ids that end an output are part of it: workers that disagree on them would end one request at different tokens.
    """
    eos = ",".join(map(str, eos_token_ids))
    return hashlib.sha256(encode_parts(fingerprint.encode(), eos.encode(), weights.encode())).hexdigest()


def _weights(path: Path) -> bytes:
    """Hash one weight file.

    A safetensors file holds 8 bytes with the length of the header (little-endian), the header as JSON, and the values.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} is not a complete safetensors file")
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(header_bytes))
        start = 8 + header_bytes
        for index in range(_SAMPLES):
            file.seek(start + index * max(0, size - start - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
