"""The shell of a beam search: each step asks the router for one token after each live beam.

Each of these requests is one of its own: it is placed and recovered like any other, and finds the KV of its prompt in the
prefix cache of a worker. At most as many run at the same time as there are beams. The call has one deadline for all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pdserve.core.errors import ContextOverflow, DeadlineExceeded, InternalBug, InvalidRequest, Overloaded
from pdserve.core.sampling import FinishReason, TokenLogprobs
from router.api.answer import Delta
from router.api.identity import new_request_id
from router.api.request import Choices, GenerateInput, Prompt, check_beams, is_chat
from router.api.router_api import RouterApi
from router.choices.beams import BeamSearch, Candidates
from router.choices.deliver import Delivery, together

LEAST_WAIT_S: Final = 0.05
"""A step that the router refuses because of its load waits at least so long before it is tried again."""


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One beam of the result."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """The result of one search, best first."""

    prompt_ids: tuple[int, ...]
    outputs: tuple[BeamOutput, ...]


def ends_at_s(api: RouterApi, deadline_s: float | None) -> float:
    """Return the time of the loop by which a call that begins now must end. Raises `InvalidRequest` and `DeadlineExceeded`."""
    asked = api.default_deadline_s if deadline_s is None else deadline_s
    if math.isnan(asked) or asked > api.max_deadline_s:
        raise InvalidRequest(f"must be at most {api.max_deadline_s:g}, got {asked:g}", field="deadline_s")
    return asyncio.get_running_loop().time() + asked


async def beam_search(api: RouterApi, request: GenerateInput, choices: Choices, ends_s: float) -> BeamAnswer:
    """Run a search until it ends, or until the loop's time is `ends_s`. Whatever ends it, nothing of it goes on.

    The ids of its requests are new, and their correlation id is that of the call, so that logs show what belongs together.
    Raises `InvalidRequest` naming a field that a search cannot have, and what `RouterApi.submit` and a generation raise.
    """
    check_beams(request)
    steps = _Steps(api, request, choices.beam_width, ends_s)
    prompt_ids, top = await steps.first()
    room = api.max_prompt_tokens + 1 - len(prompt_ids)
    max_tokens = request.sampling.get("max_tokens", room)
    if max_tokens > room:
        prompt = "messages" if is_chat(request.prompt) else "prompt"
        raise ContextOverflow.of_output(max_tokens, len(prompt_ids), api.max_prompt_tokens + 1, prompt=prompt)
    end_ids = () if request.sampling.get("ignore_eos") else api.model_info().eos_token_ids
    search = BeamSearch(choices.beam_width, max_tokens, length_penalty=choices.length_penalty, end_ids=end_ids)
    search.advance([top])
    while search.live:
        search.advance(await steps.next([prompt_ids + beam.ids for beam in search.live]))
    outputs = []
    for beam in search.result():
        reason = FinishReason.STOP if beam.ended else FinishReason.LENGTH
        outputs.append(BeamOutput(beam.ids, api.text_of(beam.ids, after=prompt_ids), reason))
    return BeamAnswer(prompt_ids, tuple(outputs))


class _Steps:
    """Asks for the candidates of beams."""

    def __init__(self, api: RouterApi, request: GenerateInput, width: int, ends_s: float) -> None:
        # The end of sequence is a token like others here: the search itself says what it means.
        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "logprobs": 2 * width}
        self._api = api
        self._ends_s = ends_s
        self._request = replace(
            request,
            sampling=sampling,
            request_id=None,
            correlation_id=request.correlation_id or request.request_id or "",
        )

    async def first(self) -> tuple[tuple[int, ...], Candidates]:
        """Return the ids of the prompt and the candidates after it. A refusal of the router ends the search at once."""
        return await self._ask(self._request.prompt)

    async def next(self, prompts: Sequence[tuple[int, ...]]) -> list[Candidates]:
        """Return the candidates after each prompt. The first failure cancels the others and is raised alone."""
        return await together([self._after(prompt) for prompt in prompts])

    async def _after(self, prompt: tuple[int, ...]) -> Candidates:
        """Ask until the router is not overloaded: what the search has done so far would be lost."""
        while True:
            try:
                return (await self._ask(prompt))[1]
            except Overloaded as exc:
                wait_s = max(LEAST_WAIT_S, exc.retry_after_s)
                if wait_s >= self._ends_s - asyncio.get_running_loop().time():
                    raise
                await asyncio.sleep(wait_s)

    async def _ask(self, prompt: Prompt) -> tuple[tuple[int, ...], Candidates]:
        left_s = self._ends_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded("the beam search was not done by its deadline")
        scores = _Scores()
        with Delivery(self._api, ends_stalled_writes=False) as delivery:
            one = replace(self._request, prompt=prompt, deadline_s=left_s)
            await delivery.submit(one, (new_request_id(),))
            await delivery.run([scores])
            (generation,) = delivery.generations
        if len(scores.told) != 1:
            count = len(scores.told)
            raise InternalBug(f"request {generation.request_id} ended with {count} tokens' log-probabilities, not one's")
        return generation.prompt_ids, scores.told[0].top


class _Scores:
    """Implements `Sink`: it keeps the log-probabilities alone."""

    is_quick = False

    def __init__(self) -> None:
        self.told: list[TokenLogprobs] = []

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        self.told += delta.logprobs

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`."""
        return False
