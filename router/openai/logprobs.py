"""Log-probabilities as OpenAI's two endpoints write them.

A token is written as the text of its bytes alone; where these are not whole characters that text is U+FFFD, and a chat
answer's `bytes` tell them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pdserve.core.logprobs import TokenLogprobs
from router.openai.errors import encode_json

TokenBytes = Callable[[int], bytes]


class JoinedLists:
    """Objects of one shape, encoded one after the other as one in which their lists follow each other."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}
        self._fixed: dict[str, bytes] = {}

    def add(self, told: dict[str, Any]) -> None:
        for name, value in told.items():
            if not isinstance(value, list):
                self._fixed[name] = encode_json(value)
            elif value:
                self._parts.setdefault(name, []).append(encode_json(value)[1:-1])
            else:
                self._parts.setdefault(name, [])

    def encode(self) -> bytes:
        """`null` when there was nothing."""
        lists = {name: b"[" + b",".join(parts) + b"]" for name, parts in self._parts.items()}
        members = [b'"%s":%s' % (name.encode(), value) for name, value in (lists | self._fixed).items()]
        return b"{" + b",".join(members) + b"}" if members else b"null"


class LogprobsFormat(Protocol):
    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the choice's next tokens."""


def logprobs_format(token_bytes: TokenBytes, *, chat: bool) -> LogprobsFormat:
    """Of one choice."""
    return ChatLogprobs(token_bytes) if chat else CompletionLogprobs(token_bytes)


class ChatLogprobs:
    """`content`: an entry a token, with the likeliest beside it."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [self._token(token_id, one) for token_id, one in zip(ids, logprobs, strict=True)]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(top_id, logprob) for top_id, logprob in logprobs.top]
        return {**self._entry(token_id, logprobs.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self._token_bytes(token_id)
        return {"token": written.decode(errors="replace"), "logprob": logprob, "bytes": list(written)}


class CompletionLogprobs:
    """Four lists, an element a token. `top_logprobs` has the drawn token too, so up to one more than was asked for.

    `text_offset` counts characters of the tokens as they are written here, as in vLLM: where a character is made of
    several tokens, or a stop string was cut off, that differs from the place in the answer's text.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def of(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
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
        """By text: of ids that are written alike the likelier one counts."""
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            top.setdefault(self._text(token_id), logprob)
        top.setdefault(drawn, logprobs.logprob)
        return top

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")
