"""The prompt as a completion or chat answer shows it: vLLM's `prompt_logprobs`, and `echo` of completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.core.sampling import FinishReason, TokenLogprobs
from router.api.answer import Delta
from router.api.request import Prompt
from router.openai.json import encode_json
from router.openai.logprobs import LogprobsFormat, TokenBytes

PIECE_TOKENS: Final = 64
"""Tokens that are written at a time, so that a long prompt does not hold the loop."""


@dataclass(frozen=True, slots=True)
class PromptShown:
    """The parts of the prompt that a call asks for."""

    echo: bool = False
    logprobs: int | None = None
    """The number of likeliest tokens beside each echoed token. None: log-probabilities are not echoed."""
    prompt_logprobs: int | None = None
    """The number of likeliest tokens in `prompt_logprobs`. None: the answer has no such field."""
    hides_output: bool = False
    """The client asked for no output token. One is drawn, and not shown."""


NOTHING_SHOWN: Final = PromptShown()


class PromptView:
    """The prompt of one choice as its answer shows it."""

    def __init__(self, shown: PromptShown, prompt: Prompt, ids: Sequence[int], token_bytes: TokenBytes) -> None:
        """`ids` are those of `prompt`."""
        self._shown = shown
        self._ids = ids
        self._token_bytes = token_bytes
        self.text = ""
        """The echoed text. A prompt of ids is written as the text of its tokens."""
        if shown.echo:
            self.text = prompt if isinstance(prompt, str) else self._written(ids)

    def output(self, delta: Delta) -> Delta:
        """Return what the answer shows of a delta."""
        if not self._shown.hides_output:
            return delta
        return Delta(delta.index, (), "", FinishReason.LENGTH if delta.finish_reason else None)

    def echoed(self, first: Delta, format_: LogprobsFormat | None) -> Iterator[dict[str, Any] | None]:
        """Yield the log-probabilities of the prompt for an echo, piece by piece. The first token has none. None: none are asked
        for. `first` is the first delta."""
        if not self._shown.echo:
            return
        if format_ is None:
            yield None
            return
        for start in range(0, len(self._ids), PIECE_TOKENS):
            scores = [_shortened(one, self._shown.logprobs or 0) for one in self._scores(first, start)]
            told = format_.of(self._ids[start : start + PIECE_TOKENS], scores)
            if not start:
                told["token_logprobs"][0] = told["top_logprobs"][0] = None
            yield told

    def listed(self, first: Delta) -> Iterator[bytes]:
        """Yield the elements of `prompt_logprobs` as JSON, piece by piece and without brackets; nothing if they are not asked
        for. `first` is the first delta."""
        if self._shown.prompt_logprobs is None:
            return
        for start in range(0, len(self._ids), PIECE_TOKENS):
            ids = self._ids[start : start + PIECE_TOKENS]
            entries: list[Any] = [self._entry(*one) for one in zip(ids, self._scores(first, start), strict=True)]
            if not start:
                entries[0] = None
            yield encode_json(entries)[1:-1]

    def _scores(self, first: Delta, start: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of a piece. A placeholder stands for the first token of the prompt."""
        end = start + PIECE_TOKENS - 1
        return [TokenLogprobs(0.0), *first.prompt_logprobs[:end]] if not start else list(first.prompt_logprobs[start - 1 : end])

    def _entry(self, token_id: int, scores: TokenLogprobs) -> dict[str, Any]:
        """Return the likeliest tokens and the prompt's own by id. `rank` is left out where the own token is not among them."""
        top = scores.top[: self._shown.prompt_logprobs]
        entry = {str(one): self._told(one, logprob) | {"rank": rank} for rank, (one, logprob) in enumerate(top, start=1)}
        entry.setdefault(str(token_id), self._told(token_id, scores.logprob))
        return entry

    def _told(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": self._token_bytes(token_id).decode(errors="replace")}

    def _written(self, ids: Sequence[int]) -> str:
        return b"".join([self._token_bytes(one) for one in ids]).decode(errors="replace")


def _shortened(one: TokenLogprobs, count: int) -> TokenLogprobs:
    return one if len(one.top) <= count else TokenLogprobs(one.logprob, one.top[:count])
