"""The choices of an OpenAI-style body: OpenAI's `n` and `best_of`, and vLLM's `use_beam_search` and `length_penalty`."""

from __future__ import annotations

from router.api.choices import BEAM_WIDTHS, LENGTH_PENALTIES, Choices, check_beams, check_number, sampled
from router.api.request import GenerateInput
from router.openai.body import ChatBody, CompletionBody
from router.openai.json import refuse, show

_BEAMS = "use_beam_search"


def read_choices(body: CompletionBody | ChatBody, prompts: int, common: GenerateInput) -> Choices:
    """Return the choices of each of the `prompts` prompts, of which `common` has the other fields. Raises `InvalidRequest`
    naming the field."""
    n = 1 if body.n is None else body.n
    best_of = None if isinstance(body, ChatBody) else body.best_of
    if body.use_beam_search:
        choices = _beams(body, n, best_of, common)
    else:
        if body.length_penalty not in (None, 1.0):
            raise refuse("length_penalty", f"is only allowed with {_BEAMS}: true, got {show(body.length_penalty)}")
        choices = sampled(n, best_of)
        if choices.ranked and body.stream:
            raise refuse("best_of", "must be n with stream: true, since the choices are not known before the end")
    check_number(choices, prompts, "best_of" if choices.ranked else "n")
    return choices


def _beams(body: CompletionBody | ChatBody, n: int, best_of: int | None, common: GenerateInput) -> Choices:
    """Read a beam search: `n` is its width, as in vLLM."""
    if not BEAM_WIDTHS.low <= n <= BEAM_WIDTHS.high:
        raise refuse("n", f"must be from {BEAM_WIDTHS.low} to {BEAM_WIDTHS.high} with {_BEAMS}: true, got {show(n)}")
    if body.stream:
        raise refuse("stream", f"is not allowed with {_BEAMS}: true, since the beams are not known before the end")
    if best_of not in (None, n):
        raise refuse("best_of", f"is not allowed with {_BEAMS}: true, where n is the number of beams")
    if body.response_format is not None and common.constraint is not None and body.structured_outputs is None:
        raise refuse("response_format", f"is not allowed with {_BEAMS}: true")
    check_beams(common)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    LENGTH_PENALTIES.check("length_penalty", penalty)
    return Choices(n, beam_width=n, length_penalty=penalty)
