"""The choices of one prompt: how many answers a client wants, of how many candidates, or as a beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import IntRange, RealRange, limit_of
from pdserve.core.sampling import GREEDY_BELOW, SamplingParams
from pdserve.core.structured.constraint import FIELD
from router.api.identity import new_request_id
from router.api.request import ChatPrompt, GenerateInput

MAX_CHOICES: Final = IntRange(1, 128)
"""The limit for one prompt is OpenAI's. Each choice is a request of its own in the router's bounded queue."""
MAX_CALL_CHOICES: Final = 256
"""The most choices of one call: those of all its prompts or requests, with the candidates that are not returned."""
BEAM_WIDTHS: Final = IntRange(1, limit_of(SamplingParams, "logprobs", IntRange).high // 2)
"""A step needs the 2 x width likeliest tokens of each beam, and a request returns at most 20."""
LENGTH_PENALTIES: Final = RealRange(-10.0, 10.0)
_FREE_IN_BEAMS: Final = ("max_tokens", "temperature", "ignore_eos", "seed")


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that a client wants for each prompt of its call."""

    n: int = 1
    best_of: int = 1
    """The number of candidates. If it is larger than `n`, the `n` likeliest ones are returned."""
    beam_width: int = 0
    """The number of beams, which is then also `n`. 0: there is no beam search."""
    length_penalty: float = 1.0
    """A beam's log-probability is divided by its number of tokens to this power."""

    @property
    def ranked(self) -> bool:
        """True when some candidates are not returned."""
        return self.best_of > self.n

    @property
    def plain(self) -> bool:
        """True when one request alone answers a prompt."""
        return self.best_of == 1 and not self.beam_width

    @property
    def requests(self) -> int:
        """The number of requests that run for one prompt at the same time."""
        return self.beam_width or self.best_of


ONE: Final = Choices()


def sampled(n: int, best_of: int | None) -> Choices:
    """Return `n` choices of `best_of` candidates; None: as many as choices. Raises `InvalidRequest` naming the field."""
    MAX_CHOICES.check("n", n)
    if best_of is None:
        return Choices(n, n)
    MAX_CHOICES.check("best_of", best_of)
    if best_of < n:
        raise InvalidRequest(f"must be at least n, which is {n}, got {best_of}", field="best_of")
    return Choices(n, best_of)


def check_number(choices: Choices, prompts: int, field: str) -> None:
    """Check the choices of `prompts` prompts together. Raises `InvalidRequest` naming `field`."""
    if prompts * choices.requests > MAX_CALL_CHOICES:
        raise InvalidRequest(
            f"{prompts} prompts with {choices.requests} choices each are {prompts * choices.requests} choices; "
            f"one call may have at most {MAX_CALL_CHOICES}",
            field=field,
        )


def check_beams(request: GenerateInput) -> None:
    """Check that a beam search can do what the request asks for. Raises `InvalidRequest` naming the first field that it
    cannot."""
    temperature = request.sampling.get("temperature", 0.0)
    if not 0.0 <= temperature < GREEDY_BELOW:
        raise InvalidRequest(f"must be 0 or not set beside a beam search, got {temperature:g}", field="temperature")
    for name, value in request.sampling.items():
        if name not in _FREE_IN_BEAMS and name in _NEUTRAL and value != _NEUTRAL[name]:
            raise InvalidRequest("is not allowed beside a beam search", field=name)
    if isinstance(request.prompt, ChatPrompt) and request.prompt.tools:
        raise InvalidRequest("are not allowed beside a beam search, which reads no calls", field="tools")
    if request.constraint is not None:
        raise InvalidRequest("is not allowed beside a beam search", field=FIELD)


_NEUTRAL: Final[dict[str, Any]] = {one.name: one.default for one in fields(SamplingParams) if one.init} | {"logit_bias": {}}
"""The value of each sampling field that asks for nothing."""


def choice_ids(first: str, count: int) -> tuple[str, ...]:
    """Return the request ids of the choices of one prompt, of which the first one is given."""
    return (first, *(f"{first}-{i}" for i in range(1, count)))


def first_id(request: GenerateInput) -> str:
    """Return the id of the request's first choice: the one that its front end has made, or a new one."""
    return request.request_id or new_request_id()


def likeliest(scores: Sequence[float], n: int) -> list[int]:
    """Return the indices of the `n` candidates with the highest scores, best first. Equal ones keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:n]
