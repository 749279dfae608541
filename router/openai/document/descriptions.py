"""The meaning of each field of a body, in one or two sentences."""

from __future__ import annotations

from typing import Final

from pdserve.core.limits import meanings_of
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from router.openai.body import WITHOUT_EFFECT

_TOLD: Final = "What the function does. The template shows it to the model."
_STRICT: Final = (
    "If true, a call is valid for the schema of its parameters. Where no grammar can enforce it, the answer lists it in "
    "x-pdserve-ignored-fields. A required call is always valid."
)

FIELDS: Final[dict[str, str]] = {
    **meanings_of(SamplingParams),
    **meanings_of(RequestSpec),
    "model": "The name of the served model. Left out: the one that is served.",
    "prompt": "The text, or the token ids, or a list of either; each entry of a list becomes a choice of the answer.",
    "messages": "The chat so far, oldest message first.",
    "input": "A text, which is a user's message, or a list of messages, earlier answers among them.",
    "instructions": "The text of a system message before the input.",
    "role": "The author of the message. `developer` means `system`.",
    "content": "The text, or a list of parts with text, which are joined with line ends.",
    "refusal": "What the model once refused with. It is text of its message.",
    "text": "The text. In the body of /v1/responses: the options of the output's text.",
    "max_tokens": "The most tokens of output. Left out: 16 for a completion, and as many as fit for a chat.",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`. If both are given, this one counts.",
    "max_output_tokens": "The most tokens of output. Left out: as many as fit.",
    "top_k": "Only so many of the likeliest tokens are drawn. 0 and -1 mean all.",
    "n": "The number of choices of each prompt. With a beam search: its width.",
    "best_of": "So many choices are sampled, and the `n` likeliest of them are told.",
    "use_beam_search": "The choices are the likeliest outputs that a beam search of width `n` finds.",
    "length_penalty": "The power of its length by which a beam's score is divided.",
    "return_token_ids": "The answer has the token ids of the prompt and of the output.",
    "add_special_tokens": "If false, a text prompt is encoded without the special tokens that the tokenizer adds.",
    "tokens": "The token ids to be written as text; at most `max_model_len`.",
    "return_token_strs": "The answer has each token as the vocabulary spells it.",
    "echo": "The text, and its log-probabilities, begin with those of the prompt. `max_tokens` may then be 0.",
    "logprobs": "Log-probabilities of the output's tokens. A completion takes the number of likeliest tokens beside each.",
    "top_logprobs": "The number of likeliest tokens that are told beside each token of the output.",
    "include": "The extras of the answer: `message.output_text.logprobs`. Others are never there, and are hints.",
    "response_format": "The form of the output: any text, any JSON object, or JSON of a schema, which is always enforced.",
    "structured_outputs": "vLLM's form of a constraint: exactly one of json, json_object, regex, choice and grammar.",
    "json_schema": "The schema, in OpenAI's wrapping.",
    "schema": "The JSON schema that the output has.",
    "format": "The form of the output: any text, any JSON object, or JSON of a schema, which is always enforced.",
    "stream": "The answer comes as server-sent events.",
    "stream_options": "The options of a streamed answer. They are only allowed with `stream: true`.",
    "include_usage": "A last chunk tells the usage.",
    "continuous_usage_stats": "Each chunk tells the usage so far.",
    "request_id": "The client's name for the request. It is logged and sent back, like the header X-Request-Id.",
    "deadline_s": "The request ends with an error after so many seconds.",
    "placement": "The worker that computes the prompt: auto, disaggregated or colocated.",
    "slo_class": "The name of the request's class of targets, like the header X-SLO-Class.",
    "session_id": "The name of the conversation, like the header X-Session-Id. Its turns find their cached prompt.",
    "prompt_cache_key": "OpenAI's name of `session_id`, which goes first.",
    "priority": "Requests with a lower number are served first, as in vLLM. A negative one needs a setting of the router.",
    "tools": "The functions that the model may call.",
    "tool_choice": "The calls that the output may or must have: none, auto, required, or one function.",
    "parallel_tool_calls": "If false, the answer has at most one call.",
    "reasoning_effort": "A variable of the model's template, which says how long the model reasons.",
    "effort": "A variable of the model's template, which says how long the model reasons.",
    "reasoning": "The options of reasoning. In a message: the reasoning of an earlier answer.",
    "reasoning_content": "The reasoning of an earlier answer.",
    "chat_template_kwargs": "Further variables of the model's template.",
    "add_generation_prompt": "If false, the template does not open a new message of the assistant.",
    "continue_final_message": "The output continues the last message, which is the assistant's.",
    "tool_calls": "The calls that the assistant made in this message.",
    "tool_call_id": "The id of the call that this message answers.",
    "call_id": "The id of the call.",
    "arguments": "The arguments of the call, as the text of a JSON object.",
    "output": "The result of the call.",
    "parameters": "The JSON schema of the arguments.",
    **WITHOUT_EFFECT,
    "metadata": "Labels. Nothing is stored here; an answer of /v1/responses repeats them.",
    "name": "A name that no model sees.",
    "TokenizeBody.prompt": "The text that is encoded.",
    "Message.name": "The author's name. A template that knows such names shows it to the model.",
    "FunctionFields.name": "The name of the function.",
    "FunctionFields.description": _TOLD,
    "FunctionFields.strict": _STRICT,
    "FunctionTool.name": "The name of the function.",
    "FunctionTool.description": _TOLD,
    "FunctionTool.strict": _STRICT,
    "CallItem.name": "The name of the function that was called.",
    "description": WITHOUT_EFFECT["response_format.json_schema.description"],
    "strict": WITHOUT_EFFECT["response_format.json_schema.strict"],
    "id": WITHOUT_EFFECT["input[].id"],
    "annotations": WITHOUT_EFFECT["messages[].annotations"],
    "prompt_cache_breakpoint": WITHOUT_EFFECT["messages[].content[].prompt_cache_breakpoint"],
    "status": WITHOUT_EFFECT["input[].status"],
}
"""The meanings by the fields' names: those that the dataclasses declare, and those of fields that JSON has in another form or
alone. A name behind that of a schema holds for this schema alone."""
