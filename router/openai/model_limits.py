"""The limits of requests, as the description of the model tells them to clients."""

from __future__ import annotations

from pdserve.core.limits import MAX_MESSAGES, IntRange, MaxCount, limit_of
from pdserve.core.sampling import SamplingParams
from router.api.request import MAX_CHOICES
from router.openai.prompt import MAX_PROMPTS, MAX_TOOLS


def model_limits(max_prompt_tokens: int, max_body_bytes: int, max_deadline_s: float) -> dict[str, float]:
    """Return the limits by name. The arguments are the router's own, which settings may change."""
    return {
        "max_prompt_tokens": max_prompt_tokens,
        "max_body_bytes": max_body_bytes,
        "max_deadline_s": max_deadline_s,
        "max_prompts": MAX_PROMPTS,
        "max_messages": MAX_MESSAGES,
        "max_n": MAX_CHOICES.high,
        "max_tools": MAX_TOOLS,
        "max_logprobs": limit_of(SamplingParams, "logprobs", IntRange).high,
        "max_stop": limit_of(SamplingParams, "stop", MaxCount).count,
        "max_stop_token_ids": limit_of(SamplingParams, "stop_token_ids", MaxCount).count,
        "max_logit_bias": limit_of(SamplingParams, "logit_bias", MaxCount).count,
    }
