"""Fields of OpenAI's or vLLM's API whose effect does not exist here.

A client that asks for the effect gets an error. A client that sends the neutral value, as many libraries always do, is served.
If such fields were ignored, the answer would quietly differ from what was asked for.
"""

from __future__ import annotations

from typing import Any, Final

from router.openai.json import Fields, refuse, show

_COMMON: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "return_token_ids": (False,),
}

_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    **_COMMON,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
del _CHAT["add_special_tokens"]  # the template alone decides for a chat prompt, and vLLM's default is false there

NEUTRAL: Final = {"completion": _COMMON, "chat": _CHAT}
"""The values of each field that ask for nothing, by endpoint. Absent and null always ask for nothing."""


def refuse_unsupported(fields: Fields, endpoint: str) -> None:
    """Check that no field asks for an effect that does not exist here. Raises `InvalidRequest` naming the first that does."""
    for name, neutral in NEUTRAL[endpoint].items():
        value = fields.raw(name)
        if value is None or any(type(value) is type(accepted) and value == accepted for accepted in neutral):
            continue
        allowed = f"; only {' or '.join(map(repr, neutral))} is accepted" if neutral else ""
        raise refuse(name, f"{show(value)} is not supported{allowed}")
