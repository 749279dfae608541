"""The schemas of answers and errors, and those statuses that clients of the HTTP front end can meet."""

from __future__ import annotations

from typing import Any, Final

from pdserve.core.error_table import TABLE
from pdserve.core.errors import ErrorCode

_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_REPORT: Final = {"type": "object", "description": "How the request was served: workers, times, bytes of KV."}

_OPERATORS: Final = (
    ErrorCode.UNKNOWN_WORKER,
    ErrorCode.WORKER_ID_TAKEN,
    ErrorCode.UNKNOWN_REQUEST,
    ErrorCode.STALE_ORDER,
    ErrorCode.CANNOT_FLIP,
    ErrorCode.CANNOT_DRAIN,
)
"""The errors of operators' calls, which HTTP does not have."""


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **optional}, "required": [*required]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _const(*values: Any) -> dict[str, Any]:
    return {"enum": [*values]}


_FINISH: Final = _const("stop", "length", "tool_calls", None)
_NAMED: Final = {"id": _TEXT, "created": _COUNT, "model": _TEXT}
_LOGPROBS: Final = {"type": ["object", "null"]}
_CACHED: Final = {**_COUNT, "description": "The prompt tokens that were not computed, because their KV was cached."}
_ACCEPTED: Final = {**_COUNT, "description": "The drafts that were right, where a worker has drafted for the request."}
_USAGE: Final = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    prompt_tokens_details=_object({"cached_tokens": _CACHED}),
    completion_tokens_details=_object(
        {},
        reasoning_tokens={**_COUNT, "description": "Those of a chat."},
        accepted_prediction_tokens=_ACCEPTED,
        rejected_prediction_tokens={
            **_COUNT,
            "description": "Those that were wrong, which `completion_tokens` does not count.",
        },
    ),
)
_CALL: Final = _object({"id": _TEXT, "type": _const("function"), "function": _object({"name": _TEXT, "arguments": _TEXT})})
_REASONING: Final = {**_TEXT, "description": "What the model thought. Both names have the same text."}
_MESSAGE: Final = _object(
    {"role": _const("assistant"), "content": {"type": ["string", "null"]}, "refusal": {"type": "null"}},
    tool_calls=_list(_CALL), reasoning_content=_REASONING, reasoning=_REASONING,
)  # fmt: skip
_STOP: Final = {
    "type": ["string", "integer", "null"],
    "description": "The stop string, or the stop token's id, of the request.",
}
_CHAT_CHOICE: Final = {
    "index": _COUNT,
    "finish_reason": _FINISH,
    "stop_reason": _STOP,
    "logprobs": _LOGPROBS,
    "message": _MESSAGE,
}
_TEXT_CHOICE: Final = {"index": _COUNT, "finish_reason": _FINISH, "stop_reason": _STOP, "logprobs": _LOGPROBS, "text": _TEXT}
_IDS: Final = {**_list(_COUNT), "description": "With `return_token_ids`."}
_SCORES: Final = {**_list({"type": ["object", "null"]}), "description": "With `prompt_logprobs`; null for the first token."}
_RESPONSE_USAGE: Final = {
    "input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT,
    "input_tokens_details": _object({"cached_tokens": _CACHED}),
}  # fmt: skip
_LIMITS: Final = {
    "max_prompt_tokens": _COUNT, "max_body_bytes": _COUNT, "max_prompts": _COUNT, "max_messages": _COUNT, "max_n": _COUNT,
    "max_tools": _COUNT, "max_logprobs": _COUNT, "max_stop": _COUNT, "max_stop_token_ids": _COUNT, "max_logit_bias": _COUNT,
    "max_deadline_s": {"type": "number"},
}  # fmt: skip
_CARD: Final = {
    "id": _TEXT, "object": _const("model"), "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT, "vocab_size": _COUNT,
    "limits": _object(_LIMITS),
}  # fmt: skip
_PARAM: Final = {"type": ["string", "null"], "description": "The field that is wrong, as the client wrote it."}
_TENSOR: Final = {"name": _TEXT, "datatype": _const("BYTES", "BOOL", "UINT32"), "shape": _list(_COUNT)}
_MODEL_VERSION: Final = {"model_name": _TEXT, "model_version": _TEXT}

ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "Completion": _object(
        {
            **_NAMED, "object": _const("text_completion"), "usage": _USAGE,
            "choices": _list(_object(_TEXT_CHOICE, token_ids=_IDS, prompt_token_ids=_IDS, prompt_logprobs=_SCORES)),
        },
        pdserve=_REPORT,
    ),
    "ChatCompletion": _object(
        {
            **_NAMED, "object": _const("chat.completion"), "usage": _USAGE,
            "choices": _list(_object(_CHAT_CHOICE, token_ids=_IDS, prompt_logprobs=_SCORES)),
        },
        pdserve=_REPORT,
        prompt_token_ids=_IDS,
    ),
    "Response": _object(
        {
            "id": _TEXT, "object": _const("response"), "created_at": _COUNT, "model": _TEXT,
            "status": _const("completed", "incomplete", "in_progress", "failed"), "output": _list({"type": "object"}),
            "error": {"type": ["object", "null"]}, "incomplete_details": {"type": ["object", "null"]}, "store": _const(False),
            "usage": {"anyOf": [_object(_RESPONSE_USAGE), {"type": "null"}]},
        },
        pdserve=_REPORT,
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)},
        token_strs={"anyOf": [_list(_TEXT), {"type": "null"}]},
    ),
    "Text": _object({"prompt": _TEXT}),
    "Version": _object({"version": _TEXT}),
    "Model": _object(_CARD),
    "Models": _object({"object": _const("list"), "data": _list({"$ref": "#/components/schemas/Model"})}),
    "Health": _object({"status": _const("ready", "unavailable")}, reason=_TEXT),
    "Service": _object({"service": _const("pdserve"), "version": _TEXT, "model": _TEXT}),
    "Error": _object({
        "error": _object({
            "message": _TEXT, "type": _TEXT, "code": _TEXT,
            "param": _PARAM,
        }),
    }),
    "InferServer": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "InferLive": _object({"live": _const(True)}),
    "InferReady": _object({"ready": {"type": "boolean"}}, name=_TEXT, reason=_TEXT),
    "InferModel": _object({
        "name": _TEXT, "versions": _list(_TEXT), "platform": _TEXT, "inputs": _list(_object(_TENSOR)),
        "outputs": _list(_object(_TENSOR)),
    }),
    "InferAnswer": _object(
        {
            **_MODEL_VERSION,
            "outputs": _list(_object(_TENSOR, data=_list({"type": ["string", "integer"]}), parameters={"type": "object"})),
        },
        id=_TEXT,
    ),
    "GenerateAnswer": _object(
        _MODEL_VERSION, text_output=_TEXT, finish_reason=_TEXT, num_input_tokens=_COUNT, num_output_tokens=_COUNT
    ),
    "InferError": _object({"error": _TEXT, "code": _TEXT, "param": _PARAM}),
}  # fmt: skip
"""The schemas of answers by name."""


def error_statuses() -> dict[str, str]:
    """Return the codes of errors by HTTP status, as a text."""
    found: dict[int, list[str]] = {}
    for code, row in TABLE.items():
        if code not in _OPERATORS:
            found.setdefault(row.http, []).append("model_not_found" if code is ErrorCode.UNKNOWN_MODEL else code.value)
    return {str(status): ", ".join(codes) for status, codes in sorted(found.items())}
