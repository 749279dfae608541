"""Requests of vLLM's gRPC interface become what the router takes. Each field is served or refused by its name; where the
interface has no word for "not set", zero means what it means in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve.core.errors import ContextOverflow, InvalidRequest
from pdserve.core.sampling import SEED_LIMIT
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.rpc.v1 import vllm_engine_pb2
from router.api.request import GenerateInput, Prompt, sampled
from router.openai.json import Ignored, joined
from router.openai.request import Names, as_written
from router.parsing.generate import GenerateCall, earlier, sampling_of

_REFUSED: Final = {
    "kv_transfer_params": "is not taken: the cluster moves KV between its own workers",
    "kv_transfer_params_json": "is not taken: the cluster moves KV between its own workers",
    "mm_inputs": "is not supported: prompts are text",
    "extra_mm_inputs": "is not supported: prompts are text",
    "media_refs": "is not supported: prompts are text",
}
_REFUSED_SAMPLING: Final = {
    "truncate_prompt_tokens": "is not supported: prompts are never cut",
    "structural_tag": "is not supported: write the form of the output as a grammar or a schema",
}
_KINDS: Final = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.LARK,
    "json_object": ConstraintKind.JSON_OBJECT,
    "choice": ConstraintKind.CHOICE,
}
_NOT_SAMPLING: Final = (
    *_KINDS,
    "n",
    "grammar_from_first_token",  # every constraint begins there
    "spaces_between_special_tokens",  # this and the next shape text, which the answer does not have
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_RANK: Final = 0
"""The one rank that the cluster shows."""


@dataclass(frozen=True, slots=True)
class VllmCall:
    """One request with its choices, and how it is answered."""

    call: GenerateCall
    stream: bool
    names: Names
    """The names by which the client knows fields that have other names here."""
    ignored: Ignored
    """The numbers of the fields that this release does not know, which were left out."""

    def of_client(self, client: tuple[str, ...]) -> VllmCall:
        """Return the request with the names of its client."""
        return replace(self, call=self.call.of_client(client))


def vllm_call(
    request: vllm_engine_pb2.GenerateRequest, *, call_remaining_s: float | None, max_deadline_s: float, max_prompt_tokens: int
) -> VllmCall:
    """Return the request of a message. `call_remaining_s` is what is left of the call's own deadline, or None without one.
    Raises `InvalidRequest` naming the field."""
    _refuse(request, _REFUSED)
    if request.data_parallel_rank != _RANK:
        raise InvalidRequest(f"must be 0, the only rank, got {request.data_parallel_rank}", field="data_parallel_rank")
    params = request.sampling_params
    _refuse(params, _REFUSED_SAMPLING)
    kind = params.WhichOneof("constraint") or ""
    names = ((FIELD, kind), ("prompt", "text" if request.WhichOneof("input") == "text" else "input_ids"))
    with as_written(names):
        asked = GenerateInput(
            prompt=_prompt(request, max_prompt_tokens),
            sampling=_sampling(params),
            correlation_id=request.request_id,
            deadline_s=earlier(None, call_remaining_s, max_deadline_s),
            constraint=_constraint(params, kind) if kind else None,
        )
    return VllmCall(GenerateCall(asked, sampled(params.n or 1, None)), request.stream, names, _unknown(request))


def _refuse(message: vllm_engine_pb2.GenerateRequest | vllm_engine_pb2.SamplingParams, refused: dict[str, str]) -> None:
    """Raise `InvalidRequest` for the first field of a message that asks for what does not exist here."""
    for descriptor, _ in message.ListFields():
        if (why := refused.get(descriptor.name)) is not None:
            raise InvalidRequest(why, field=descriptor.name)


def _unknown(request: vllm_engine_pb2.GenerateRequest) -> Ignored:
    """Return the fields of newer releases of the interface that the message has. Nobody knows their names here."""
    parts = {"": request, "sampling_params.": request.sampling_params, "tokenized.": request.tokenized}
    numbers: dict[str, None] = {}
    for place, part in parts.items():
        unknown = UnknownFieldSet(part)
        numbers |= dict.fromkeys(f"{place}{unknown[i].field_number}" for i in range(len(unknown)))
    return joined([Ignored(tuple(numbers), len(numbers))])


def _prompt(request: vllm_engine_pb2.GenerateRequest, max_tokens: int) -> Prompt:
    """Return the prompt. A message has room for millions of ids, so their count is checked before they are copied."""
    kind = request.WhichOneof("input")
    if kind == "text":
        return request.text
    if kind is None:
        raise InvalidRequest("is missing: set tokenized or text", field="input")
    if (count := len(request.tokenized.input_ids)) > max_tokens:
        raise ContextOverflow.of_prompt(f"{count} tokens", max_tokens + 1, field="prompt")
    return tuple(request.tokenized.input_ids)


def _sampling(params: vllm_engine_pb2.SamplingParams) -> dict[str, Any]:
    values = sampling_of(params, _NOT_SAMPLING)
    if params.HasField("seed"):
        values["seed"] = params.seed % SEED_LIMIT  # as over HTTP: distinct seeds stay distinct
    if params.stop and not params.skip_special_tokens:
        values["skip_special_tokens"] = False  # only stop strings ask for text
    return values


def _constraint(params: vllm_engine_pb2.SamplingParams, kind: str) -> Constraint:
    if kind == "json_object" and not params.json_object:
        raise InvalidRequest("must be true", field=FIELD)
    texts = tuple(params.choice.choices) if kind == "choice" else ()
    return Constraint(_KINDS[kind], "" if kind in ("choice", "json_object") else getattr(params, kind), texts)
