"""Log-probabilities in the shapes of OpenAI's two endpoints.

A token is written as the text of its own bytes. Bytes that are not whole characters become U+FFFD in that text; the `bytes` of
a chat answer give them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pdserve.core.sampling import TokenLogprobs
from router.openai.json import encode_json

TokenBytes = Callable[[int], bytes]


class JoinedLists:
    """Joins JSON objects of one shape: lists of the same name follow each other. Each object is encoded as it comes."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}
        self._fixed: dict[str, bytes] = {}

    def add(self, told: dict[str, Any]) -> int:
        """Append the lists of one object, and return how many bytes they take. Fields that are not lists keep their last
        value."""
        length = 0
        for name, value in told.items():
            if not isinstance(value, list):
                self._fixed[name] = encode_json(value)
            elif value:
                part = encode_json(value)[1:-1]
                self._parts.setdefault(name, []).append(part)
                length += len(part)
            else:
                self._parts.setdefault(name, [])
        return length

    def encode(self) -> bytes:
        """Return the joined object as JSON. It is `null` if nothing was added."""
        lists = {name: b"[" + b",".join(parts) + b"]" for name, parts in self._parts.items()}
        members = [b'"%s":%s' % (name.encode(), value) for name, value in (lists | self._fixed).items()]
        return b"{" + b",".join(members) + b"}" if members else b"null"


class LogprobsFormat(Protocol):
    """One choice's log-probabilities in the shape of an endpoint."""

    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for the choice's next tokens. `ids` and `logprobs` have the same length."""


def logprobs_format(token_bytes: TokenBytes, *, chat: bool) -> LogprobsFormat:
    """Return the format for one choice."""
    return ChatLogprobs(token_bytes) if chat else CompletionLogprobs(token_bytes)


class ChatLogprobs:
    """The chat endpoint's shape. `content` has one entry for each token, with the likeliest tokens beside it."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Implements `LogprobsFormat.of`."""
        content = [self._token(token_id, one) for token_id, one in zip(ids, logprobs, strict=True)]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(top_id, logprob) for top_id, logprob in logprobs.top]
        return {**self._entry(token_id, logprobs.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._token_bytes(token_id)
        return {"token": written.decode(errors="replace"), "logprob": logprob, "bytes": list(written)}


class CompletionLogprobs:
    """The completion endpoint's shape: four lists with one element for each token. `top_logprobs` also has the drawn token, so
    up to one more than was asked for.

    `text_offset` counts characters of the tokens as they are written here, as in vLLM. It differs from the place in the
    answer's text where several tokens make one character, or where a stop string was cut off.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Implements `LogprobsFormat.of`."""
        tokens = [self._text(token_id) for token_id in ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in logprobs],
            "tokens": tokens,
            "top_logprobs": [self._top(token, one) for token, one in zip(tokens, logprobs, strict=True)],
        }

    def _top(self, drawn: str, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by text. Of ids with the same text the likelier one counts."""
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            top.setdefault(self._text(token_id), logprob)
        top.setdefault(drawn, logprobs.logprob)
        return top

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")
