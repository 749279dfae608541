"""Service classes: the targets of each class of requests, and its priority among the classes. Pure.

A class has a target for TTFT, a target for TPOT, or both. A request that names no class belongs to the default class, which is
`DEFAULT_CLASS` unless a setting names another class.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import check_types
from pdserve.core.speculation import MAX_DRAFTS

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # it is a label of metrics and a header's value


@dataclass(frozen=True, slots=True)
class SloClass:
    """One class of requests. None means that there is no target: no wait and no gap misses it."""

    name: str
    ttft_s: float | None = None
    """The first token should leave the router so long after the request has arrived."""
    tpot_s: float | None = None
    """The later tokens should come so far apart on average."""
    priority: int = 0
    """Admission adds it to the priority of each request of the class, so that workers see it as well. The sum stays within the
    limits of clients. A class of higher priority may shed requests of lower classes."""
    queue_share: float = 1.0
    """The requests of the class may fill this share of the queue."""
    urgent: bool = False
    """The requests of the class go before others by the difference of their targets for TTFT. No built-in class is urgent,
    since any client may name a built-in class."""
    client: bool = True
    """Clients may name the class. Otherwise only requests that name none belong to it, where it is the default class."""
    max_deadline_s: float | None = None
    """The longest deadline, in seconds, that a request of the class may ask for. None: only the router's limit bounds it."""
    num_speculative_tokens: int | None = None
    """The most drafts of a step for a request of the class that names no limit itself. 0: none. None: the workers' settings
    alone decide."""

    def ttft_met(self, ttft_s: float) -> bool | None:
        """Tell whether a first token after this time meets the target. None: there is no target."""
        return None if self.ttft_s is None else ttft_s <= self.ttft_s

    def tpot_met(self, tpot_s: float) -> bool | None:
        """Tell whether such a time between tokens meets the target. None: there is no target."""
        return None if self.tpot_s is None else tpot_s <= self.tpot_s


DEFAULT_CLASS: Final = SloClass("default")

BUILT_IN: Final = {
    one.name: one
    for one in (
        DEFAULT_CLASS,
        SloClass("voice", ttft_s=0.15),
        SloClass("code", ttft_s=0.2),
        SloClass("chat", ttft_s=0.5, tpot_s=0.05),
        SloClass("batch", ttft_s=2.0, priority=-1, queue_share=0.5),
    )
}
"""The classes that every router knows, by name. The settings may change them and add others."""


_TargetS = Annotated[float, Meta(gt=0, le=86_400)]  # a day: who needs no target writes null, and JSON has no infinity


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a class, with the values that each setting takes."""

    ttft_s: _TargetS | None
    tpot_s: _TargetS | None
    priority: Annotated[int, Meta(ge=-100, le=100)]
    queue_share: Annotated[float, Meta(gt=0, le=1)]
    urgent: bool
    client: bool
    max_deadline_s: _TargetS | None
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] | None


_KNOWN: Final = tuple(one.name for one in dataclasses.fields(_Settings))


def classes_of(changes: Mapping[str, Mapping[str, Any]], setting: str) -> dict[str, SloClass]:
    """Return the classes by name: the built-in classes with the changes, and the new classes. `setting` is the dotted name of
    the changes. Raises `ConfigError`, which names the setting of the class."""
    return BUILT_IN | {name: _changed(name, values, f"{setting}.{name}") for name, values in changes.items()}


def _changed(name: str, values: Mapping[str, Any], path: str) -> SloClass:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: {name!r:.100} is not the name of a class; write up to 63 letters, digits, dots, _ and -")
    for key in values:
        if key not in _KNOWN:
            raise ConfigError(f"unknown setting {path}.{key}; known here: {', '.join(sorted(_KNOWN))}")
    before = BUILT_IN.get(name, SloClass(name))
    settings = _Settings(**{key: values.get(key, getattr(before, key)) for key in _KNOWN})
    check_types(settings, f"{path}.")
    return SloClass(name, **dataclasses.asdict(settings))


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """The requests of one class that ended or were refused since the router's start, by its targets."""

    slo_class: str
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    late_by_queue: int = 0
    """Requests that missed the target for TTFT, by what took most of the time: waiting for room on a decode worker.
    A sibling waited for all that its leader waited for."""
    late_by_prefill_queue: int = 0
    """Waiting on the prefill worker."""
    late_by_prefill: int = 0
    """Computing the prompt there."""
    late_by_colocated: int = 0
    """The prompt on the decode worker, its wait there included."""
    late_by_failure: int = 0
    """Attempts that failed, or were given up for a move. Also requests that failed without a token, other than by a wait."""
    slow_by_transfer: int = 0
    """Requests that missed the target for TPOT, by what made them slow: the transfer of KV after the first token."""
    slow_by_first_decode: int = 0
    """The rest of the time between the first token and the first decoded token."""
    slow_by_steps: int = 0
    """The steps after it, which would have been too slow alone, and moves to another worker."""
    slow_by_failure: int = 0
    """Attempts that failed after the first token. Also requests that failed while their tokens were in time."""
    refused: int = 0
    """The requests that were refused at once because of the load."""
    first_gap_s: float = 0.0
    """The sum of the times between the first token and the first decoded token."""
    first_gaps: int = 0
    """The requests that had both."""


@dataclass(frozen=True, slots=True)
class DemandCounts:
    """The load since the router's start. Demand in inference.proto explains each field."""

    uptime_s: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0
    queued_prompt_tokens: int = 0
    longest_wait_s: float = 0.0
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    placed_prompt_tokens: int = 0
    prefill_prompt_tokens: int = 0
    classes: tuple[ClassDemand, ...] = ()

    def of_class(self, name: str) -> ClassDemand:
        """Return the counts of a class, all of them 0 where none of its requests has ended."""
        return next((one for one in self.classes if one.slo_class == name), ClassDemand(name))
