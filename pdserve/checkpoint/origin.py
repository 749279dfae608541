"""Where a directory came from, as far as it cannot be read from its config.json: the model's name.

A directory that pdserve wrote holds a small file of its own. One that huggingface_hub downloaded lies under
`models--ORG--NAME/snapshots/COMMIT`. Any other is called what the directory is called.
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
    (directory / ORIGIN_FILE).write_text(json.dumps({"name": name, "source": source}, indent=2) + "\n")


def model_name(directory: Path) -> str:
    """The name that clients use unless another is configured."""
    origin = directory / ORIGIN_FILE
    if origin.is_file():
        name = read_json(origin).get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{origin} lacks name")
        return name
    absolute = Path(os.path.abspath(directory))  # links not resolved: the link's name is what the operator chose
    repository = absolute.parent.parent.name
    if absolute.parent.name == "snapshots" and repository.startswith(_HUB_PREFIX):
        return repository.removeprefix(_HUB_PREFIX).replace("--", "/")
    return absolute.name
