"""Redaction: a recording tells no prompts, outputs or secrets. The same values replace them in events and in effects.

Token ids, biases of tokens, text, stop strings and log-probabilities become their counts, from which `expand` makes
placeholders of the same lengths. All constraints become the same one. The core looks at nothing else of them, so a replay
decides as the router did. Salts, names of sessions and tickets become digests with a key that is drawn for each recording and
written nowhere: equal values stay equal, and nobody can find the originals by trial. Other keys replace prefix keys in the same
way (`recording.keys`).
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from typing import Any, Final

from pdserve.core.structured.constraint import ConstraintKind
from router.recording.keys import KeyRedaction

KEY_BYTES: Final = 32  # HMAC-SHA256 gets a key as long as its output
DIGEST_CHARS: Final = 32  # 128 bits: two of them never agree by chance
FILLER: Final = "x"
MAX_PLACEHOLDERS: Final = 1 << 24
"""The most placeholders of one event. The body of a request has at most 8 MiB, and a token takes at least one byte of it."""


class Redaction:
    """Replaces the values that a recording must not contain."""

    def __init__(self, key: bytes | None, *, prompts: bool) -> None:
        """`key` is secret. None: salts, sessions and tickets are digests already. `prompts`: prompts, outputs and stop strings
        stay."""
        self._rules: dict[str, Callable[[Any], Any]] = {}
        self._keys = None if key is None else KeyRedaction(key)
        if key is not None and self._keys is not None:
            self._rules |= dict.fromkeys(("cache_salt", "session_id"), lambda name: _name(key, name))
            self._rules["ticket"] = lambda ticket: _ticket(key, ticket)
            self._rules["prefix_keys"] = self._keys.keys
        if not prompts:
            self._rules |= {
                "prompt_ids": len,
                "resumed": len,
                "ids": len,
                "text": len,
                "stop": _lengths,
                "stop_token_ids": len,
                "logit_bias": len,
                "constraint": _some_constraint,
                "logprobs": _logprob_counts,
                "prompt_logprobs": _logprob_counts,
            }

    def hide(self, value: Any) -> Any:
        """Return the plain value of an event or effect, or of a part of it, without secret values."""
        if isinstance(value, dict):
            row = _is_row(value)
            hidden = {name: self._hide_field(name, item, row) for name, item in value.items()}
            return hidden if self._keys is None else self._hide_keys(self._keys, hidden)
        if isinstance(value, list):
            return [self.hide(item) for item in value] if value and isinstance(value[0], dict) else value
        return value

    def _hide_keys(self, keys: KeyRedaction, value: dict[str, Any]) -> dict[str, Any]:
        kind = value.get("type")
        if kind == "WorkerLeft":
            keys.left(value["link"])
        return keys.seen(value) if kind == "PrefixSeen" else value

    def _hide_field(self, name: str, value: Any, row: bool) -> Any:
        rule = self._rules.get(name)
        if rule is None or value is None:
            return self.hide(value)
        if isinstance(value, int):
            return value  # the `logprobs` of sampling parameters is a count already
        return _row_text(value) if row and name == "text" else rule(value)


def expand(value: Any) -> Any:
    """Return the plain value of an event with placeholders for the counts of `Redaction.hide`. Other values stay.

    Raises `ValueError` for a count that is negative, and for more than `MAX_PLACEHOLDERS` placeholders in all.
    """
    return _Expansion().expand(value)


class _Expansion:
    """The placeholders of one event."""

    def __init__(self) -> None:
        self._left = MAX_PLACEHOLDERS

    def expand(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.expand(item) for item in value] if value and isinstance(value[0], dict) else value
        if not isinstance(value, dict):
            return value
        row = _is_row(value)
        return {name: self._field(name, item, row) for name, item in value.items()}

    def _field(self, name: str, value: Any, row: bool) -> Any:
        if name in ("prompt_ids", "ids", "stop_token_ids") and isinstance(value, int):
            return [0] * self._count(value)
        if name == "logit_bias" and isinstance(value, int):
            return [(token_id, 0.0) for token_id in range(self._count(value))]
        if name == "text" and isinstance(value, int):
            text = FILLER * self._count(value)
            return base64.b64encode(text.encode()).decode() if row else text
        if name == "stop" and value and isinstance(value[0], int):
            return [FILLER * self._count(length) for length in value]
        if name in ("logprobs", "prompt_logprobs") and row and isinstance(value, list):
            chosen, top_ids, top = map(self._count, value)
            return {"chosen": [0.0] * chosen, "top_ids": [0] * top_ids, "top": [0.0] * top}
        return self.expand(value)

    def _count(self, count: int) -> int:
        if not 0 <= count <= self._left:
            raise ValueError(f"a count must be in [0, {self._left}], got {count}")
        self._left -= count
        return count


def _some_constraint(value: Any) -> dict[str, Any]:
    """Return one constraint for all, because the text of a constraint may reveal as much as a prompt. The core only looks at
    whether there is one."""
    return {"kind": ConstraintKind.JSON_OBJECT.value, "text": "", "choices": []}


def _is_row(value: dict[str, Any]) -> bool:
    return "finish_reason" in value and "handle" in value


def _row_text(text: str) -> int | str:
    """Return the length of a row's text, which is UTF-8 in base64. Bytes that are not UTF-8 are no text and stay: the core
    refuses the row for them."""
    try:
        return len(base64.b64decode(text).decode())
    except UnicodeDecodeError:
        return text


def _name(key: bytes, name: str) -> str:
    return _digest(key, name.encode()) if name else ""


def _ticket(key: bytes, ticket: str) -> str:
    return base64.b64encode(_digest(key, base64.b64decode(ticket)).encode()).decode()


def _digest(key: bytes, secret: bytes) -> str:
    return hmac.new(key, secret, "sha256").hexdigest()[:DIGEST_CHARS]


def _lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def _logprob_counts(logprobs: Any) -> list[int]:
    """Return the numbers of tokens, of ids of likeliest tokens, and of their log-probabilities. A row's packed form and a
    delta's form give the same."""
    if isinstance(logprobs, dict):
        return [len(logprobs["chosen"]), len(logprobs["top_ids"]), len(logprobs["top"])]
    top = sum(len(token["top"]) for token in logprobs)
    return [len(logprobs), top, top]
