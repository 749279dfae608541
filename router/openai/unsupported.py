"""Fields that OpenAI's or vLLM's API defines and whose effect does not exist here.

A client that asks for the effect is told so; one that sends the neutral value, as many libraries always do, is
served. Ignoring them would return an answer that is quietly not what was asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from router.openai.json import decode, refuse, show

MAX_SMALL_BYTES: Final = 100  # of JSON; no neutral value is larger, so a larger value is never decoded
_VALUE: Final = msgspec.json.Decoder()


class _Unsupported:
    """The default of a field whose effect does not exist. It holds the values that ask for nothing."""

    def __init__(self, neutral: tuple[Any, ...]) -> None:
        self.neutral = neutral


def unsupported(*neutral: Any) -> Any:
    """A field whose effect does not exist. The values that ask for nothing are given; absent and null always do."""
    return _Unsupported(neutral)


@cache
def neutral_values(shape: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """The values that ask for nothing, of each field whose effect does not exist."""
    fields = msgspec.structs.fields(shape)
    return {field.name: field.default.neutral for field in fields if isinstance(field.default, _Unsupported)}


def refuse_unsupported(fields: msgspec.Struct, prefix: str = "") -> None:
    """Raises `InvalidRequest` naming the first field that asks for an effect we do not have."""
    for name, neutral in neutral_values(type(fields)).items():
        raw = getattr(fields, name)
        if isinstance(raw, msgspec.Raw):
            _refuse_unless_neutral(prefix + name, bytes(raw), neutral)


def _refuse_unless_neutral(field: str, text: bytes, neutral: tuple[Any, ...]) -> None:
    small = len(text) <= MAX_SMALL_BYTES
    value = decode(text, _VALUE, field) if small else text[:MAX_SMALL_BYTES].decode(errors="replace")
    if value is None or any(type(value) is type(accepted) and value == accepted for accepted in neutral):
        return
    allowed = f"; only {' or '.join(map(repr, neutral))} is accepted" if neutral else ""
    raise refuse(field, f"{show(value)} is not supported{allowed}")
