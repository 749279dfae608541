"""The answer to a client: the tokens of a request as they come, and the report of how it was served, which each answer, a
failed one too, carries as one short line of JSON (its timeline).

Both are immutable structs of msgspec, because a frozen dataclass takes six times as long to make, and each token makes one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import msgspec

from pdserve.core.errors import Cancelled, InternalBug
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, TokenLogprobs


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of call number `index` of an answer. `id` and `name` stand in the first piece alone."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True):
    """Tokens [index, index + len(ids)) of a request's output, and the text that became certain with them."""

    index: int
    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each id if the request asks for log-probabilities, else none."""
    reasoning: str = ""
    """What the model wrote to itself. It is not part of `text`."""
    calls: tuple[CallDelta, ...] = ()
    """Pieces of calls, at most one of each call. They are not part of `text`."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each prompt token but the first, in the first delta, if the request asks for them."""
    stop_string: int = 0
    """1 + the place in the request's list of the stop string that ended the output. 0: none did."""
    stop_reason: int | str | None = None
    """What stopped the output, in the last delta, as in vLLM: the stop string, or the id of the stop token that the client
    named. None: the model's own end token, a grammar or the length."""


class Generation(Protocol):
    """One running request. Iterate it to its end, or `close` it. Either releases everything that it holds."""

    request_id: str
    prompt_len: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as the model gets it."""

    @property
    def dropped(self) -> Cancelled | None:
        """The reason why the client was dropped: it took nothing for too long. None: it was not."""

    def on_stalled(self, callback: Callable[[], object]) -> None:
        """Set a callback for when the client is dropped. It ends a task that waits for the client to read."""

    def take_by(self, taker: Callable[[Delta], bool]) -> None:
        """Let `taker` have deltas while the iterating task waits for one. That costs less than to wake the task, which gets the
        last delta and each one that `taker` refuses by False. A generation may leave all of them to the task."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate over the deltas. The last one has a finish reason. Raises a `PdserveError` when the request fails."""

    @property
    def report(self) -> Report:
        """The report exists once the last delta or the error is there. Raises `InternalBug` before."""

    def close(self) -> None:
        """Cancel at once what is still running: the client is gone. Idempotent; never blocks."""


def unexpected() -> InternalBug:
    """Return what a client is told of an exception that nobody expected. The log has its traceback."""
    return InternalBug("internal error; the router's log has the details")


_ENCODER: Final = msgspec.json.Encoder()


def report_json(report: Report) -> dict[str, Any]:
    """Return the report by the field names of `RequestReport`. Durations are rounded to the microsecond. A request without
    drafts has no `speculation`."""
    values = {name: round(value, 6) if type(value) is float else value for name, value in report.values().items()}
    values["placement"] = report.placement.value
    if report.speculation is None:
        del values["speculation"]
    else:
        values["speculation"] = report.speculation.summary()
    return values


def timeline(report: Report) -> bytes:
    """Return the report as one line of ASCII JSON, fit for gRPC metadata and for an HTTP header. It has some 600 bytes."""
    values = report_json(report)
    if report.correlation_id.isascii():  # nothing else in a report is a client's text
        line = _ENCODER.encode(values)  # takes a fifth of the time, but leaves other characters as they are
        if line.isascii():
            return line
    return json.dumps(values, separators=(",", ":")).encode()
