"""The names of fields as the client wrote them, for errors of the router, which has one name for each value."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import FIELD, ConstraintKind
from router.openai.body import Body, CompletionBody

Names = tuple[tuple[str, str], ...]
"""Pairs of the router's name of a field and the client's. The name of a field inside it begins with its name and a dot."""

_FORMAT: Final = "response_format"


def written_names(body: Body) -> Names:
    """Return the names of the fields of a body that are not those of the router."""
    names: list[tuple[str, str]] = []
    if body.max_completion_tokens is not None:
        names.append(("max_tokens", "max_completion_tokens"))
    if body.response_format is not None:
        names.append((f"{FIELD}.{ConstraintKind.JSON_SCHEMA.value}", f"{_FORMAT}.json_schema.schema"))
        names.append((FIELD, _FORMAT))
    if isinstance(body, CompletionBody) and body.echo and body.prompt_logprobs is None:
        names.append(("prompt_logprobs", "logprobs"))
    return tuple(names)


def renamed(error: InvalidRequest, names: Names) -> InvalidRequest:
    """Return the error with the name that the client wrote."""
    for own, written in names:
        if error.field == own or error.field.startswith(f"{own}."):
            told = error.message.removeprefix(error.field).removeprefix(": ")
            return type(error)(f"{written}: {told}", field=written)
    return error
