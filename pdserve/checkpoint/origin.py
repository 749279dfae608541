"""The name of the model in a directory, which its config.json does not tell.

A directory that pdserve wrote holds the name in a small file. A directory that huggingface_hub downloaded lies under
`models--ORG--NAME/snapshots/COMMIT`. In any other case the model has the name of its directory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from pdserve.checkpoint.layout import read_json
from pdserve.core.errors import ConfigError

ORIGIN_FILE: Final = "pdserve.json"
_HUB_PREFIX: Final = "models--"


def write_origin(directory: Path, *, name: str, source: str) -> None:
    """Write the model's name, and the file or generator from which the directory was made."""
    (directory / ORIGIN_FILE).write_text(json.dumps({"name": name, "source": source}, indent=2) + "\n")


def model_name(directory: Path) -> str:
    """Return the name that clients use unless another is configured. Raises `ConfigError` when pdserve's file is damaged."""
    origin = directory / ORIGIN_FILE
    if origin.is_file():
        name = read_json(origin).get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{origin} lacks name")
        return name
    absolute = Path(os.path.abspath(directory))  # links are not resolved, since the operator chose the link's name
    repository = absolute.parent.parent.name
    if absolute.parent.name == "snapshots" and repository.startswith(_HUB_PREFIX):
        return repository.removeprefix(_HUB_PREFIX).replace("--", "/")
    return absolute.name
