"""The speed of an engine, learned from the times of its steps. Pure.

Steps with prompts and steps without them are two kinds, each with exponential means of its tokens and of its time. So a long
phase without prompts does not make the engine forget what prompts cost. The cost of a step is a line through both kinds,
`fixed_s + token_s * tokens`. The line passes through the mean of what was seen; noise turns it at most to a cost without a
fixed part, or to one without a part for tokens.

A slow step is mostly a disturbance: a page fault, a compiled kernel, another process. It counts as `DISTURBED` times what was
expected at most. A fast step is none: nothing computes faster by chance. So a step that takes less than 1 / `DISTURBED` of what
was expected shows that the steps before it were disturbed or are of the past, and its kind begins anew.

A target for the time between tokens (TPOT) bounds the time of a step, since each decoding sequence gets one token a step. So
`chunk_budget` says how many prompt tokens a step may compute beside sequences that decode.
"""

from __future__ import annotations

from typing import Final, NamedTuple

WINDOW_STEPS: Final = 64
"""The weight of a step falls by e in so many steps of its kind: 2 s of 30 ms, or 20 s of 300 ms."""
WINDOW_TOKENS: Final = 8192
"""The weight of a prompt's tokens in the rate falls by e in so many tokens: 16 full steps on a CPU, one on a GPU."""
DISTURBED: Final = 4.0
"""The chunks of one prompt differ by less: the last of 4,000 tokens took 2.5 times as long as the first (measured on a CPU)."""
KNOWN_STEPS: Final = 2
"""The cost is known after so many steps with prompts. A first one alone may have been disturbed."""
KNOWN_TOKENS: Final = 64
"""The rate of prompts is told after so many of their tokens. Probes of two tokens take a whole step each: by their rate the
router would refuse requests that the worker could serve in time."""
STRAIN_WEIGHT: Final = 0.25
"""The weight of the newest step in the strain: steps of a long prompt cost more one after the other, and four of them tell."""
STEP_S_MIN: Final = 1e-6
STEP_S_MAX: Final = 3600.0


class StepCost(NamedTuple):
    """The expected time of a step: a fixed part, and a part for each of its tokens. Both are in seconds and not negative."""

    fixed_s: float
    token_s: float

    def step_s(self, tokens: float) -> float:
        """Return the expected time of a step of so many tokens, in seconds."""
        return self.fixed_s + self.token_s * tokens


class StepKind:
    """Exponential means of the steps of one kind: their tokens (x) and their seconds (y)."""

    __slots__ = ("steps", "sxx", "sxy", "x", "y")

    def __init__(self) -> None:
        self.steps = 0
        self.x = self.y = self.sxx = self.sxy = 0.0

    def add(self, tokens: int, step_s: float) -> None:
        """Take one step into the means."""
        self.steps = min(self.steps + 1, WINDOW_STEPS)
        weight = 1.0 / self.steps
        dx, dy = tokens - self.x, step_s - self.y
        self.x += weight * dx
        self.y += weight * dy
        self.sxx = (1.0 - weight) * (self.sxx + weight * dx * dx)
        self.sxy = (1.0 - weight) * (self.sxy + weight * dx * dy)


class StepRates:
    """The rates and the cost of an engine's steps. The engine thread owns it."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._rate_tokens = 0
        self._told = 0.0
        """The rate that was known when the steps with prompts last began anew. 0: none was."""
        self._with_prompts = StepKind()
        self._decodes = StepKind()
        self._strain = 1.0

    @property
    def strain(self) -> float:
        """The time of the last steps with prompts, as a multiple of what was expected, at least 1 and at most `DISTURBED`. It
        is above 1 while the end of a long prompt is computed, since its tokens attend to all before them."""
        return max(1.0, self._strain)

    @property
    def prompt_tokens_per_s(self) -> float:
        """The mean rate of steps that compute prompts, in prompt tokens a second. Each step counts by its prompt tokens, so a
        step of a few tokens, which is slow for each of them, changes little. 0: fewer than `KNOWN_TOKENS` were computed.

        A rate that was known stays known: while its kind begins anew, the better one of the last rate and of the few tokens
        since counts, for a step of few tokens is no faster than others. A decode worker that had lost the rate of its start to
        one fast probe would otherwise never get a prompt by which it could learn another.
        """
        return self._rate if self._rate_tokens >= KNOWN_TOKENS else max(self._told, self._rate) if self._told else 0.0

    @property
    def decode_step_s(self) -> float:
        """The mean time of a step that computes no prompt, in seconds. 0: there was none."""
        return self._decodes.y

    def add(self, prompt_tokens: int, decode_tokens: int, step_s: float) -> None:
        """Learn from one step of so many tokens. A time that is not positive or no number is ignored."""
        tokens = prompt_tokens + decode_tokens
        if not step_s > 0.0 or not tokens:
            return
        kind = self._with_prompts if prompt_tokens else self._decodes
        step_s = min(max(step_s, STEP_S_MIN), STEP_S_MAX)
        if kind.steps:
            expected_s = self._line().step_s(tokens)
            if step_s * DISTURBED < min(expected_s, kind.y):
                kind = self._begin_anew(with_prompts=bool(prompt_tokens))
            elif kind.steps >= KNOWN_STEPS:
                step_s = min(step_s, DISTURBED * max(expected_s, kind.y))
                if prompt_tokens:
                    multiple = min(step_s / max(expected_s, STEP_S_MIN), DISTURBED)
                    self._strain += STRAIN_WEIGHT * (multiple - self._strain)
        kind.add(tokens, step_s)
        if prompt_tokens:
            self._rate_tokens = max(min(self._rate_tokens + prompt_tokens, WINDOW_TOKENS), prompt_tokens)
            rate = prompt_tokens / step_s
            self._rate += (rate - self._rate) * (prompt_tokens / self._rate_tokens)

    @property
    def cost(self) -> StepCost | None:
        """The expected time of steps. None: too few steps with prompts were seen."""
        return self._line() if self._with_prompts.steps >= KNOWN_STEPS else None

    def _begin_anew(self, *, with_prompts: bool) -> StepKind:
        kind = StepKind()
        if with_prompts:
            self._told = self.prompt_tokens_per_s
            self._with_prompts, self._rate_tokens, self._strain = kind, 0, 1.0
        else:
            self._decodes = kind
        return kind

    def _line(self) -> StepCost:
        """Return the line of least squares through the steps of both kinds, which count alike however many they are."""
        one, other = self._with_prompts, self._decodes
        if not one.steps or not other.steps:
            only = one if one.steps else other
            return _through(only.x, only.y, only.sxx, only.sxy)
        dx, dy = one.x - other.x, one.y - other.y
        sxx, sxy = one.sxx + other.sxx + dx * dx / 2, one.sxy + other.sxy + dx * dy / 2
        return _through((one.x + other.x) / 2, (one.y + other.y) / 2, sxx, sxy)


def _through(x: float, y: float, sxx: float, sxy: float) -> StepCost:
    """Return the line through (x, y) with the slope of least squares, or the nearest one whose parts are not negative.

    Without a spread of the tokens the time counts as proportional to them. This makes small steps too cheap, so one is tried,
    and then the spread is there.
    """
    steepest = y / x
    slope = min(max(sxy / sxx, 0.0), steepest) if sxx > 1e-9 * x * x else steepest
    return StepCost(max(y - slope * x, 0.0), slope)


TARGET_SHARE: Final = 0.8
"""The planned time of a step, as a share of the target. The rest is for what a plan does not know: later chunks
of a prompt cost more than the mean one, and a token still passes the worker's loop, the link and the router."""


def chunk_budget(target_s: float, cost: StepCost | None, *, decodes: int, floor: int, ceiling: int) -> int:
    """Return the largest number of prompt tokens with which a step still meets the target.

    target_s: the target in seconds; 0: there is none. cost: the expected time of steps; None: nobody knows it. decodes: tokens
    of the step that are no prompt's. floor: the step computes at least so many prompt tokens, whatever the target, so that
    prompts go on. ceiling: it has memory for so many at most, which also bounds the floor.
    """
    if target_s <= 0.0 or cost is None:
        return ceiling
    left_s = target_s * TARGET_SHARE - cost.step_s(decodes)
    if left_s >= cost.token_s * ceiling:
        return ceiling
    if left_s <= cost.token_s * floor:
        return min(floor, ceiling)
    return int(left_s / cost.token_s)
