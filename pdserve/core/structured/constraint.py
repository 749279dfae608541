"""Constraints on a request's output, with their limits. Pure. `pdserve.structured` compiles a constraint to a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdserve.core.errors import InvalidRequest

FIELD: Final = "structured_outputs"
"""The field of a request that holds its constraint. The name is vLLM's."""
MAX_GRAMMAR_BYTES: Final = 64 << 10
"""The most bytes of a constraint. They are read on the loops of the router and of workers, so they should not be many times
the largest request that the router parses there (32 KiB)."""
MAX_CHOICES: Final = 1024


class ConstraintKind(Enum):
    """The language in which a constraint is written. The values are the names of vLLM's `structured_outputs`."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json"
    REGEX = "regex"
    LARK = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on all of a request's output: if the output ends by itself, its text belongs to this language.

    `text` is the JSON schema, the regular expression or the Lark grammar. `choices` are the whole texts of which the output is
    one. `JSON_OBJECT` needs neither. Raises `InvalidRequest`, which names the field and the limit.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        field = f"{FIELD}.{self.kind.value}"
        if (self.kind is ConstraintKind.CHOICE) != bool(self.choices):
            raise InvalidRequest("a list of choices and nothing else belongs to `choice`", field=field)
        if (self.kind in (ConstraintKind.JSON_OBJECT, ConstraintKind.CHOICE)) == bool(self.text):
            raise InvalidRequest("must hold a text" if not self.text else "takes no text", field=field)
        if len(self.choices) > MAX_CHOICES:
            raise InvalidRequest(f"has {len(self.choices)} choices; at most {MAX_CHOICES} are allowed", field=field)
        if not all(self.choices):
            raise InvalidRequest("a choice must not be empty", field=field)
        try:
            size = sum(len(one.encode()) for one in (self.text, *self.choices))
        except UnicodeEncodeError as exc:
            raise InvalidRequest("is not valid Unicode: it has a lone surrogate", field=field) from exc
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", field=field)
