"""Facts about the machine and the run, from the `meta` of a result. Whatever is missing or of another type is unknown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

MOST_CHARS: Final = 200
"""The longest text that is taken over."""


class Facts:
    """The known keys of `meta`, which is text of a file that nobody has checked."""

    def __init__(self, meta: Mapping[str, object]) -> None:
        self.meta = meta

    @property
    def load_average(self) -> float | None:
        """The load of the machine when the run began, over one minute."""
        found = self._at("hardware", "load_average")
        return _number(found[0] if isinstance(found, list | tuple) and found else found)

    @property
    def cores(self) -> float | None:
        """The cores of the machine."""
        return _number(self._at("hardware", "cores"))

    @property
    def gpu(self) -> str | None:
        """The GPU of the workers. None: they compute on CPUs, or it is not known."""
        return clean(self._at("hardware", "gpu"))

    @property
    def one_host(self) -> bool:
        """All workers are known to share one machine."""
        hosts = self._at("cluster", "hosts")
        return isinstance(hosts, int) and hosts == 1

    @property
    def prompt_tokens(self) -> float | None:
        """The mean tokens of a prompt."""
        return _number(self.meta.get("mean_prompt_tokens"))

    def conditions(self) -> dict[str, str]:
        """Return the facts that a reader wants to see, by their names."""
        places = {
            "model": ("cluster", "model", "name"),
            "weights": ("cluster", "model", "dtype"),
            "KV": ("cluster", "model", "kv_cache_dtype"),
            "CPU": ("hardware", "cpu"),
            "cores": ("hardware", "cores"),
            "load before": ("hardware", "load_average"),
            "GPU": ("hardware", "gpu"),
            "pdserve": ("pdserve",),
            "commit": ("commit", "id"),
            "seed": ("seed",),
            "began": ("started",),
        }
        found = {name: text for name, path in places.items() if (text := clean(self._at(*path)))}
        if self._at("commit", "dirty") is True and "commit" in found:
            found["commit"] += ", with changes"
        return found

    def _at(self, *path: str) -> object:
        found: object = self.meta
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _number(value: object) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if usable else None  # type: ignore[arg-type]


def clean(value: object) -> str | None:
    """Return a text of a file in one line, without characters that command a terminal, and not too long. None: it is none."""
    if isinstance(value, bool | None) or not isinstance(value, str | int | float):
        return None
    text = "".join(char if char.isprintable() else " " for char in str(value))
    return (text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 3]}...") or None


def prompt_tokens(workload: Mapping[str, object]) -> float | None:
    """Return the tokens of a prompt where the workload gives them as one number."""
    source = workload.get("source")
    return _number(source.get("prompt")) if isinstance(source, Mapping) else None


def describe(workload: Mapping[str, object]) -> str:
    """Return a workload as one line of `name value` pairs. The name of a nested value is that of its own key."""
    return clean(", ".join(_pairs(workload))) or "not said"


def _pairs(values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _pairs(value)
        elif value not in (None, "", (), [], False):
            yield f"{name} {value}"
