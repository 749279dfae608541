"""Random JSON schemas of the keywords that are enforced, and random walks through the masks of a grammar."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pdserve.structured.state import ConstraintState

Schema = dict[str, Any]
Draw = Callable[[random.Random, int], Schema]


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """Draw a schema whose values are short, so that most outputs end."""
    leaves: list[Draw] = [_string, _integer, _number, _word, _plain]
    nodes: list[Draw] = [_object, _array, _either] if depth < 3 else []
    return rng.choice(leaves + 2 * nodes)(rng, depth)


UNSUPPORTED: tuple[Schema, ...] = (
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "null"}},
    {"type": "string", "not": {"const": "x"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "propertyNames": {"maxLength": 3}},
)
"""Schemas that the library does not enforce. The last key of each is what a refusal must name."""


def random_schema_of_any_kind(rng: random.Random) -> tuple[Schema, str]:
    """Draw a schema of which every sixth has a part that is not enforced. Return it, and the name of that part or nothing."""
    if rng.randrange(6):
        return random_schema(rng), ""
    part = rng.choice(UNSUPPORTED)
    *_, keyword = part
    wrapped: list[Schema] = [
        part,
        {"type": "object", "properties": {"inner": part}, "required": ["inner"], "additionalProperties": False},
        {"type": "array", "items": part, "minItems": 1},
    ]
    return rng.choice(wrapped), keyword


def _string(rng: random.Random, _: int) -> Schema:
    least = rng.randint(0, 3)
    kinds: list[Schema] = [
        {"minLength": least, "maxLength": least + rng.randint(0, 6)}, {"pattern": "^[a-c]{1,4}-[0-9]+$"}, {"format": "date"},
        {"maxLength": 5},
    ]  # fmt: skip
    return {"type": "string", **rng.choice(kinds)}


def _integer(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-1000, 1000)
    limits = {"minimum": low, "maximum": low + rng.randint(0, 2000)}
    return {"type": "integer", **rng.choice([limits, {"exclusiveMinimum": low, "maximum": low + 9}, limits])}


def _number(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 9)}


def _word(rng: random.Random, _: int) -> Schema:
    words: list[Any] = ["yes", "no", 'ä"\\', 7, None, True, ["x"], {"k": 1.5}]
    chosen = rng.sample(words, rng.randint(1, 4))
    return {"const": chosen[0]} if rng.random() < 0.3 else {"enum": chosen}


def _plain(rng: random.Random, _: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["name", "size", "a b", "ü", "is_open", "Id", "$x"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.7]
    fields = {name: random_schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def allowed_ids(mask: bytes) -> list[int]:
    """Return the token ids that a mask allows, ascending."""
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def walk(state: ConstraintState, eos_token_ids: tuple[int, ...], rng: random.Random, most: int = 400) -> tuple[list[int], bool]:
    """Draw tokens at random among those that the masks allow. Return them, and whether the output ended by itself."""
    output: list[int] = []
    while len(output) < most:
        mask = state.mask()
        assert mask is not None, state.failure
        ids = allowed_ids(mask)
        assert ids, "a mask that allows nothing"
        ends = [token_id for token_id in ids if token_id in eos_token_ids]
        output.append(rng.choice(ends if ends and rng.random() < 0.5 else ids))
        assert state.accept(output[-1])
        if output[-1] in eos_token_ids or state.ended:
            return output, True
    return output, False
