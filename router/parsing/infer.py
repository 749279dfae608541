"""Messages of the Open Inference Protocol become what the router takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec
from msgspec import Raw

from pdserve.rpc.v1 import open_inference_pb2
from router.kserve.request import InferCall, check_outputs, check_tensor, element, read_call, text_element
from router.kserve.signature import INPUTS, TensorSpec
from router.openai.json import refuse, show
from router.parsing.generate import earlier

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
"""Triton's parameter asks for an empty message at the end if the last output did not say that it is the last. Here it always
does, so both values mean the same."""
_CONTENTS: Final = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}


def infer_call(
    request: open_inference_pb2.ModelInferRequest, *, call_remaining_s: float | None, max_deadline_s: float
) -> InferCall:
    """Return the request of a message. `call_remaining_s` is what is left of the call's own deadline, or None without one.
    Raises `InvalidRequest` naming the field."""
    wanted = _wanted(request.outputs)
    places = [("inputs", _tensors(request)), ("the parameters", _parameters(request.parameters))]
    call = read_call(places, wanted=wanted, name=request.id)
    deadline_s = earlier(call.input.deadline_s, call_remaining_s, max_deadline_s)
    return replace(
        call, input=replace(call.input, deadline_s=deadline_s), model=request.model_name, version=request.model_version
    )


def _tensors(request: open_inference_pb2.ModelInferRequest) -> dict[str, Raw]:
    if len(request.inputs) > len(INPUTS):
        raise refuse("inputs", f"holds {len(request.inputs)} tensors; at most {len(INPUTS)} are allowed")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise refuse("raw_input_contents", f"holds {len(raw)} tensors, and inputs holds {len(request.inputs)}")
    tensors: dict[str, Raw] = {}
    for i, one in enumerate(request.inputs):
        spec = check_tensor(one.name, one.datatype, one.shape, tensors)
        for name in one.parameters:
            raise refuse(f"{one.name}.parameters.{show(name)[1:-1]}", "is not supported")
        if not raw:
            tensors[one.name] = _content(spec, one.contents)
        elif one.HasField("contents"):
            raise refuse(one.name, "contents are not allowed beside raw_input_contents")
        else:
            tensors[one.name] = element(spec, raw[i])
    return tensors


def _content(spec: TensorSpec, contents: open_inference_pb2.InferTensorContents) -> Raw:
    """Return the one element of a tensor, which stands in the field of its type."""
    wanted = _CONTENTS[spec.datatype]
    filled = [field.name for field, _ in contents.ListFields()]
    values = getattr(contents, wanted)
    if filled != [wanted] or len(values) != 1:
        raise refuse(spec.name, f"must have one element in {wanted}, got {len(values)} there and others in {filled or 'none'}")
    (value,) = values
    return text_element(spec.name, value) if spec.datatype == "BYTES" else Raw(msgspec.json.encode(value))


def _parameters(parameters: Mapping[str, open_inference_pb2.InferParameter]) -> dict[str, Raw]:
    told: dict[str, Raw] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise refuse(show(name)[1:-1], "has no value")
        value = getattr(parameter, kind)
        if name == EMPTY_FINAL and kind == "bool_param":
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse(show(name)[1:-1], f"must be a finite number, got {value}")
        told[name] = Raw(msgspec.json.encode(value))
    return told


def _wanted(outputs: Iterable[open_inference_pb2.ModelInferRequest.InferRequestedOutputTensor]) -> tuple[str, ...] | None:
    names = []
    for one in outputs:
        for name in one.parameters:
            raise refuse(f"{show(one.name)[1:-1]}.parameters.{show(name)[1:-1]}", "is not supported")
        names.append(one.name)
    return check_outputs(names)
