"""The GPUs of this machine, counted without loading torch or CUDA, which takes seconds and memory on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/dev")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def gpus_here(environment: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Count the GPUs that a process with this environment may use.

    NVIDIA's driver has a file nvidia0, nvidia1, ... for each GPU, and a container has those that were given to it. The variable
    lists some of them; as in CUDA, an id below 0 ends the list.
    """
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
    listed = environment.get(VISIBLE)
    if listed is None:
        return count
    ids = [one.strip() for one in listed.split(",")]
    end = next((index for index, one in enumerate(ids) if not one or one.startswith("-")), len(ids))
    return min(count, end)
