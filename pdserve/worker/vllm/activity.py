"""The counts of one server as its worker sees it from outside: tokens, and the times in which it had work. Pure.

vLLM tells neither the times nor the kinds of its steps. A server counts as busy with prompts while it owes the first token of
any prompt, and as busy with outputs while it owes only further tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.05
"""The part of a running mean that the newest value makes up: about 20 values count."""


@dataclass(slots=True)
class Outstanding:
    """A request that the server has not answered in full. `prompt`: it owes the first token of a prompt that it computes."""

    prompt: bool
    answered_s: float | None = None
    """The time of its last answer."""
    ended: bool = False


class Activity:
    """The counts of one server since its worker began. Every method takes the present time."""

    def __init__(self) -> None:
        self.computed_prompt_tokens = self.output_tokens = 0
        self.prompts = 0
        """The prompts that were computed. Each counts as one step, since vLLM does not tell which prompts shared one."""
        self.prompt_busy_s = self.decode_busy_s = 0.0
        self.decode_step_s = 0.0
        """The mean time between two answers to a request. 0: there were none."""
        self.streaming = 0
        """The requests that have got an answer and will get more."""
        self._with_prompt = self._with_output = 0
        self._seen_s = self._prompt_since_s = 0.0
        self._recent_tokens = self._recent_s = 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """The prompt tokens of a busy second, as a mean over the last prompts. 0: there was none."""
        return self._recent_tokens / self._recent_s if self._recent_s else 0.0

    def advance(self, now_s: float) -> None:
        """Count the time since the last call."""
        if self._with_prompt:
            self.prompt_busy_s += now_s - self._seen_s
        elif self._with_output:
            self.decode_busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def begin(self, now_s: float, *, prompt: bool) -> Outstanding:
        """Count a request that the server gets. `prompt`: the server computes its prompt. `end` it."""
        self.advance(now_s)
        if prompt:
            if not self._with_prompt:
                self._prompt_since_s = now_s
            self._with_prompt += 1
        else:
            self._with_output += 1
        return Outstanding(prompt)

    def computed(self, request: Outstanding, prompt_tokens: int, now_s: float) -> None:
        """Count a prompt, of which so many tokens were computed. What follows are outputs."""
        self.advance(now_s)
        request.prompt = False
        self._with_prompt -= 1
        self._with_output += 1
        self.prompts += 1
        self.computed_prompt_tokens += prompt_tokens
        self._recent_tokens += prompt_tokens - SHARE * self._recent_tokens
        self._recent_s += now_s - self._prompt_since_s - SHARE * self._recent_s
        self._prompt_since_s = now_s

    def answered(self, request: Outstanding, tokens: int, now_s: float) -> None:
        """Count an answer to a request: so many tokens of output. The time between two answers is that of a step."""
        self.output_tokens += tokens
        if request.answered_s is None:
            self.streaming += 1
        else:
            step_s = now_s - request.answered_s
            self.decode_step_s += (step_s - self.decode_step_s) * (SHARE if self.decode_step_s else 1.0)
        request.answered_s = now_s

    def end(self, request: Outstanding, now_s: float) -> None:
        """Count no more of a request. Idempotent."""
        if request.ended:
            return
        self.advance(now_s)
        request.ended = True
        self.streaming -= request.answered_s is not None
        if request.prompt:
            self._with_prompt -= 1
        else:
            self._with_output -= 1
