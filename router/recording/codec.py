"""The translation of the core's events and effects to plain values for JSON, and back. It follows from the types, so that no
type is listed here.

Rows come from the wire as messages, and are recorded as `RecordedRow`, which the core reads in the same way.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Final

import msgspec

from pdserve.core.error_table import CLASSES
from pdserve.core.errors import ErrorCode, InvalidRequest, Overloaded, PdserveError
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from router.core import events as ev

Plain = dict[str, Any]

EVENTS: Final[dict[str, type[Any]]] = {cls.__name__: cls for cls in typing.get_args(ev.Event)}
EFFECTS: Final[dict[str, type[Any]]] = {cls.__name__: cls for cls in typing.get_args(ev.Effect)}
TYPE: Final = "type"


class RecordedBug(Exception):
    """A recorded exception that is no `PdserveError`: the name of its class, and its message."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedLogprobs:
    """The packed log-probabilities of a recorded row. It has the shape of `PackedLogprobs`."""

    chosen: tuple[float, ...] = ()
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedRow:
    """A recorded row of an engine step. It has the shape of `Row`."""

    handle: int
    index: int
    ids: tuple[int, ...]
    text: bytes
    finish_reason: int
    logprobs: RecordedLogprobs = RecordedLogprobs()
    prompt_logprobs: RecordedLogprobs = RecordedLogprobs()
    stop_string: int = 0
    speculation: DraftCounts = NO_COUNTS


def to_plain(value: Any) -> Plain:
    """Return an event or effect as values that JSON can hold, with the name of its type."""
    if type(value) is ev.StepRows:
        value = ev.StepRows(value.link, tuple([_recorded(row) for row in value.rows]))
    plain: Plain = {TYPE: type(value).__name__}
    plain |= msgspec.to_builtins(value, enc_hook=_from_foreign)
    return typing.cast(Plain, _finite(plain))


def event_from_plain(plain: Plain) -> ev.Event:
    """Return the event that `to_plain` has written. Raises `ValueError` for anything else."""
    return typing.cast(ev.Event, _from_plain(plain, EVENTS))


def effect_from_plain(plain: Plain) -> ev.Effect:
    """Return the effect that `to_plain` has written. An error gets the class that belongs to its code. Raises `ValueError` for
    anything else."""
    return typing.cast(ev.Effect, _from_plain(plain, EFFECTS))


def error_to_plain(error: PdserveError) -> Plain:
    """Return the code and the message of an error, and the attributes that its class needs."""
    plain: Plain = {"code": error.code.value, "message": error.message}
    if isinstance(error, InvalidRequest):
        plain["field"] = error.field
    if isinstance(error, Overloaded):
        plain["retry_after_s"] = error.retry_after_s
        if error.reason:
            plain["reason"] = error.reason
    return plain


def _from_plain(plain: Plain, types: dict[str, type[Any]]) -> Any:
    fields = dict(plain)
    cls = types.get(fields.pop(TYPE, ""))
    if cls is None:
        raise ValueError(f"{plain.get(TYPE)!r} is none of {', '.join(types)}")
    try:
        if cls is ev.StepRows:
            rows = msgspec.convert(fields["rows"], tuple[RecordedRow, ...], strict=False)
            return ev.StepRows(ev.LinkId(fields["link"]), rows)
        return msgspec.convert(fields, cls, strict=False, dec_hook=_to_foreign)
    except (msgspec.ValidationError, KeyError, TypeError, PdserveError) as exc:
        raise ValueError(f"{cls.__name__}: {exc}") from exc


def _from_foreign(value: Any) -> Any:
    if isinstance(value, PdserveError):
        return error_to_plain(value)
    if isinstance(value, Exception):
        return {"name": value.name if isinstance(value, RecordedBug) else type(value).__name__, "message": str(value)}
    raise NotImplementedError(f"{type(value).__name__} cannot be recorded")


def _to_foreign(cls: type[Any], plain: Any) -> Any:
    if not issubclass(cls, Exception):
        raise NotImplementedError(f"{cls.__name__} cannot be read from a recording")
    fields = dict(plain)
    if "name" in fields:
        return RecordedBug(**fields)
    return CLASSES[ErrorCode(fields.pop("code"))](fields.pop("message"), **fields)


def _recorded(row: ev.Row) -> RecordedRow:
    logprobs, of_prompt = [
        RecordedLogprobs(tuple(p.chosen), tuple(p.top_ids), tuple(p.top)) for p in (row.logprobs, row.prompt_logprobs)
    ]
    told = DraftCounts.told(row.speculation)
    return RecordedRow(
        row.handle, row.index, tuple(row.ids), row.text, row.finish_reason, logprobs, of_prompt, row.stop_string, told
    )


def _finite(value: Any) -> Any:
    """Return the value with numbers that JSON lacks as text: "inf", "-inf" and "nan"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        ends = value[:1], value[-1:]  # lists of ids are long; counts of drafts begin with a number and end with a list
        return list(value) if all(isinstance(item, int | str) for end in ends for item in end) else [*map(_finite, value)]
    return value
