"""OpenVINO's files of a checkpoint, converted by optimum-intel in the engine's own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from bench.engine.peers.install import NotInstalled, reason
from pdserve.checkpoint.cache import build_once, default_cache_dir

CONVERT_LIMIT_S: Final = 900.0
_CONVERT: Final = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past")


def openvino_folder(directory: Path, weights: str, python: Path) -> Path:
    """Return the folder with a checkpoint in OpenVINO's format. It is converted once, into the cache.

    weights: the format of the weights, fp32 or int8. python: the Python of OpenVINO's environment. Raises `NotInstalled` when
    the conversion fails.
    """

    def convert(scratch: Path) -> None:
        command = (str(python), *_CONVERT, "--model", str(directory), "--weight-format", weights, str(scratch))
        settings = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=CONVERT_LIMIT_S, env=settings)

    try:
        return build_once(default_cache_dir() / "peers" / f"openvino-{directory.name}-{weights}", convert)
    except (OSError, subprocess.SubprocessError) as exc:
        raise NotInstalled(reason(f"OpenVINO's conversion to {weights}", "failed", exc)) from exc
