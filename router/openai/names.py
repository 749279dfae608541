"""The names of fields as the client wrote them, for errors of the router, which has one name for each value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import FIELD
from router.openai.body import Body, ChatBody, CompletionBody
from router.openai.json import renamed
from router.openai.structured import SCHEMA

Names = tuple[tuple[str, str], ...]
"""Pairs of the router's name of a field and the client's. The name of a field inside it begins with its name and a dot."""

EFFORT: Final = "reasoning_effort"
"""A field of a chat, and the variable of the template that it becomes."""
_FORMAT: Final = "response_format"


def written_names(body: Body) -> Names:
    """Return the names of the fields of a body that are not those of the router."""
    names: list[tuple[str, str]] = []
    if body.max_completion_tokens is not None:
        names.append(("max_tokens", "max_completion_tokens"))
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        names.append((f"chat_template_kwargs.{EFFORT}", EFFORT))
    if body.response_format is not None:
        names.append((SCHEMA, f"{_FORMAT}.json_schema.schema"))
        names.append((FIELD, _FORMAT))
    if isinstance(body, CompletionBody) and body.echo and body.prompt_logprobs is None:
        names.append(("prompt_logprobs", "logprobs"))
    return tuple(names)


@contextlib.contextmanager
def as_written(names: Names) -> Iterator[None]:
    """Give errors the name that the client wrote."""
    try:
        yield
    except InvalidRequest as exc:
        for own, written in names:
            if exc.field == own or exc.field.startswith(f"{own}."):
                raise renamed(exc, written) from exc
        raise
