"""Sampling parameters, the random numbers of the draws, edits of logits, and log-probabilities. Pure.

A draw depends on (seed, output index) alone, never on batch, worker or attempt, so a seeded request gets the same tokens on
any worker and in any batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, Protocol

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import IntRange, MaxCount, RealRange, TextLengths, check_fields, limited

SEED_LIMIT = 1 << 64
GREEDY_BELOW: Final = 1e-5
"""A temperature below this is 0, as in vLLM (`_SAMPLING_EPS` of its sampling_params.py). Draws are computed in float32, where
logits over 3e38 times the temperature overflow."""
LEAST_REAL = 1e-6
"""The smallest top_p, and the smallest min_p other than 0, since less may round to 0 in float32. A smaller top_p counts as this
value, which leaves only the likeliest token, and a smaller min_p counts as 0."""
LEAST_REPETITION_PENALTY = 0.01
"""Logits are divided by the penalty. A model's logits are far under 1e6, so the results stay far from overflow in float32."""


class FinishReason(StrEnum):
    """The reason why a request ended without an error. The values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The model stopped after calls of tools. Only the router's front ends know this reason: all other parts see `STOP`."""


FINISH_BY_NUMBER: Final = {0: None, 1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.TOOL_CALLS}
"""The finish reason of each number on the wire (`FinishReason` in common.proto). None: the output goes on."""


class Placement(Enum):
    """The placement that a request asks for: it says which worker computes its prompt."""

    AUTO = "auto"
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


class _Biases:
    """Pairs of (token id, bias): each id occurs once, and each bias is in [-100, 100]."""

    def check(self, name: str, value: tuple[tuple[int, float], ...]) -> None:
        """Raise `InvalidRequest` for an id that occurs twice, or for a bias outside the range. NaN is in no range."""
        if len({token_id for token_id, _ in value}) < len(value):
            raise InvalidRequest("names an id twice", field=name)
        for token_id, bias in value:
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f"the bias of token id {token_id} must be in [-100, 100], got {bias}", field=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request. Raises `InvalidRequest`, which names the field and its range.

    `max_tokens` is the number of output tokens, counted from the original prompt.

    Order: `logit_bias` is added first. Then the penalties follow, as in vLLM (`apply_penalties` of its layers/utils.py):
    `repetition_penalty` divides the positive logits, and multiplies the other logits, of ids in the prompt or the output. The
    logits of ids in the output lose `frequency_penalty` for each occurrence, and `presence_penalty` once (as OpenAI's).
    Temperature, top-k, top-p and min-p come last. `logprobs` is the number of likeliest tokens that are returned beside each
    drawn token. Log-probabilities come from the model's logits before any of these changes (vLLM's `raw_logprobs`). None: no
    log-probabilities are returned.
    """

    max_tokens: int = limited(16, IntRange(1, 1 << 31), means="The most tokens of output. Left out: as many as fit.")
    temperature: float = limited(
        1.0,
        RealRange(0.0, 2.0),
        means="The temperature of sampling. Below 1e-5 it is 0, which always takes the likeliest token.",
    )
    top_k: int = limited(0, IntRange(0, 1 << 31), means="Only so many of the likeliest tokens are drawn. 0 means all.")
    top_p: float = limited(
        1.0, RealRange(0.0, 1.0), means="Only the likeliest tokens whose probabilities add up to this are drawn."
    )
    min_p: float = limited(
        0.0, RealRange(0.0, 1.0), means="Only tokens at least this fraction as likely as the likeliest one are drawn."
    )
    seed: int = limited(0, IntRange(0, SEED_LIMIT - 1), means="The same seed gives the same output. Left out: a random one.")
    stop: tuple[str, ...] = limited(
        (), MaxCount(16, "strings"), TextLengths(1, 1024), means="The output ends before the first of these strings."
    )
    """OpenAI allows 4 strings; vLLM has no limit. Each string is searched for at each token."""
    stop_token_ids: tuple[int, ...] = limited((), MaxCount(256, "ids"), means="The output ends with the first of these tokens.")
    min_tokens: int = limited(0, means="The output does not end before so many tokens.")
    """It is `max_tokens` or less."""
    ignore_eos: bool = limited(False, means="The output does not end at the model's end token.")
    presence_penalty: float = limited(
        0.0, RealRange(-2.0, 2.0), means="This is taken once from the logits of tokens that the output has."
    )
    frequency_penalty: float = limited(
        0.0, RealRange(-2.0, 2.0), means="This is taken from the logits of a token for each time that the output has it."
    )
    repetition_penalty: float = limited(
        1.0,
        RealRange(LEAST_REPETITION_PENALTY, 2.0),
        means="The positive logits of tokens in the prompt or the output are divided by this, others multiplied.",
    )
    logit_bias: tuple[tuple[int, float], ...] = limited(
        (), MaxCount(300, "entries"), _Biases(), means="A number for each token id, which is added to its logit."
    )
    """Pairs of (id, bias); each id occurs once. The number of entries is OpenAI's and vLLM's limit."""
    logprobs: int | None = limited(
        None, IntRange(0, 20), means="Log-probabilities of the output's tokens, with so many likeliest ones beside each."
    )
    """The limit is OpenAI's for chat, and vLLM's default."""
    prompt_logprobs: int | None = limited(
        None, IntRange(0, 20), means="Log-probabilities of the prompt's tokens, with so many likeliest ones beside each."
    )
    """The number of likeliest tokens that are returned beside each prompt token but the first. None: no log-probabilities."""
    include_stop_str_in_output: bool = limited(False, means="The text keeps the stop string or stop token that ended it.")
    """The text ends behind the stop string or the stop token that ended it, and not before."""
    skip_special_tokens: bool = limited(True, means="The text leaves out special tokens. Left out: true.")
    """False: the text has the written form of special tokens. A stop string may then match it."""
    edits_logits: bool = field(init=False, repr=False, compare=False)
    """Derived: True when a bias or a penalty is set."""
    plainly_greedy: bool = field(init=False, repr=False, compare=False)
    """Derived: True when each draw is the model's largest logit, and no bias, penalty or log-probability is asked for."""

    def __post_init__(self) -> None:
        check_fields(self)
        IntRange(0, self.max_tokens).check("min_tokens", self.min_tokens)
        self._lift_tiny()
        self._derive()

    def _lift_tiny(self) -> None:
        """Replace what float32 cannot hold by the nearest value that it can."""
        if 0.0 < self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p < LEAST_REAL:
            object.__setattr__(self, "top_p", LEAST_REAL)
        if 0.0 < self.min_p < LEAST_REAL:
            object.__setattr__(self, "min_p", 0.0)

    def _derive(self) -> None:
        """Compute the derived fields once for each request, because every row of every step reads them."""
        penalised = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
        edits_logits = penalised or bool(self.logit_bias)
        object.__setattr__(self, "edits_logits", edits_logits)
        object.__setattr__(self, "plainly_greedy", self.greedy and not edits_logits and self.logprobs is None)

    @property
    def greedy(self) -> bool:
        """True when the token with the largest edited logit is taken."""
        return self.temperature == 0.0


_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends only on the seed and the absolute output index.

    SplitMix64 (Steele, Lea, Flood 2014, fig. 17) runs twice, once for the seed and once for the index, so that neighbouring
    seeds and indices give unrelated numbers. The result has 53 bits, as many as a double holds.
    """
    state = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    return (_mix((state + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) * (1.0 / (1 << 53))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# Edits of logits ------------------------------------------------------------------------------------------------------
#
# The edits of a sequence's logits: its own parameters and tokens change them before a token is drawn.
#
# Penalties depend only on the prompt and the output so far, so a sequence that was preempted, replayed or handed over edits its
# logits in the same way. Each token is counted once, when it is known, so a step costs only its new tokens.


class LogitEdits:
    """The edits of one sequence, which owns them. Order: the biases are added; then `seen_ids` get the repetition penalty, and
    the frequency and presence penalties by their output counts.

    The arrays hold signed 32-bit ids and counts and float32 biases, as compiled code reads them. They grow, so their
    addresses hold for one step only.
    """

    __slots__ = ("_done", "_place", "_prompt_len", "bias", "bias_ids", "output_counts", "seen_ids")

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self.bias_ids = array("i", (token_id for token_id, _ in params.logit_bias))
        self.bias = array("f", (bias for _, bias in params.logit_bias))
        self.seen_ids = array("i")
        """The ids that the penalties change, each once, in order of appearance. They include the ids of the prompt only if
        there is a repetition penalty."""
        self.output_counts = array("i")
        """The number of times that seen_ids[i] is in the output."""
        self._place: dict[int, int] = {}
        self._prompt_len = prompt_len
        self._done = 0 if params.repetition_penalty != 1.0 else prompt_len

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Count the new tokens. `tokens` is the prompt, then the output; tokens of earlier calls must not have changed."""
        for position in range(self._done, len(tokens)):
            self._count(tokens[position], position >= self._prompt_len)
        self._done = max(self._done, len(tokens))

    def after(self, token_id: int) -> LogitEdits:
        """Return the edits as they are once this output token is known too. Both go on by themselves."""
        copy = LogitEdits.__new__(LogitEdits)
        copy.bias_ids, copy.bias = self.bias_ids, self.bias
        copy.seen_ids, copy.output_counts = self.seen_ids[:], self.output_counts[:]
        copy._place, copy._prompt_len, copy._done = dict(self._place), self._prompt_len, self._done + 1
        copy._count(token_id, True)
        return copy

    def _count(self, token_id: int, is_output: bool) -> None:
        place = self._place.setdefault(token_id, len(self.seen_ids))
        if place == len(self.seen_ids):
            self.seen_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += is_output


def edits_of(params: SamplingParams, prompt_len: int) -> LogitEdits | None:
    """Make the edits of one sequence. Return None when the parameters change no logit."""
    return LogitEdits(params, prompt_len) if params.edits_logits else None


# Log-probabilities ----------------------------------------------------------------------------------------------------
#
# Log-probabilities of output tokens. They are immutable, because they cross threads and, packed, the wire.

MAX_PROMPT_LOGPROBS_BYTES: Final = 3 << 20
"""Bytes that the log-probabilities of one prompt may take on the wire. A message of a link has at most 8 MiB, and one step
ends at most two prompts that are scored; clients of gRPC take 4 MiB unless told otherwise."""
_TOKEN_BYTES: Final = 4
_TOP_BYTES: Final = 8  # a float and an id, which has up to 4 bytes below 2^28


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one output token: natural logarithms of the model's own probabilities, before temperature,
    penalties, bias and filters.

    `top` has (id, log-probability) of the most likely tokens, most likely first; the lower id comes first among equals. The
    drawn token is not added to `top`.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PackedLogprobs(Protocol):
    """The log-probabilities of consecutive output tokens, concatenated, as they cross the wire. Each output token has the same
    number of likeliest tokens."""

    @property
    def chosen(self) -> Sequence[float]:
        """The log-probability of each drawn token."""

    @property
    def top_ids(self) -> Sequence[int]:
        """The ids of the likeliest tokens of all output tokens."""

    @property
    def top(self) -> Sequence[float]:
        """The log-probability of each id in `top_ids`."""


def check_prompt_logprobs(prompt_len: int, count: int | None) -> None:
    """Check that the log-probabilities of a prompt, with `count` likeliest tokens each, fit one message. Raises
    `InvalidRequest`."""
    if count is None:
        return
    most = MAX_PROMPT_LOGPROBS_BYTES // (_TOKEN_BYTES + _TOP_BYTES * count)
    if prompt_len > most:
        raise InvalidRequest(
            f"{count} likeliest tokens are possible for prompts of at most {most} tokens, and this one has {prompt_len}",
            field="prompt_logprobs",
        )


def unpack_logprobs(packed: PackedLogprobs, count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each of `count` tokens. Raises ValueError when `packed` holds another number."""
    width, rest = divmod(len(packed.top), max(count, 1))
    if len(packed.chosen) != count or rest:
        raise ValueError(
            f"{len(packed.chosen)} log-probabilities and {len(packed.top)} likeliest tokens came, {count} tokens were expected"
        )
    if any(map(math.isnan, packed.chosen)) or any(map(math.isnan, packed.top)):
        raise ValueError("a log-probability is not a number")
    top = tuple(zip(packed.top_ids, packed.top, strict=True))
    return tuple(TokenLogprobs(value, top[i * width : (i + 1) * width]) for i, value in enumerate(packed.chosen))
