"""Answers of the Open Inference Protocol: what the output of a request becomes, as JSON and as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.sampling import FinishReason
from router.api.answer import Delta
from router.kserve.request import InferCall
from router.kserve.signature import SHAPE, VERSION
from router.openai.json import encode_json

UNFINISHED: Final = "None"
"""The finish reason of an answer that goes on: Triton's vLLM backend writes Python's None as a text."""


class Output:
    """Implements `Sink`: it gathers the output of one request, until `values` takes it."""

    is_quick = False

    def __init__(self, call: InferCall, prompt_tokens: int, gather: Callable[[int], None] = lambda length: None) -> None:
        """`gather` is told the bytes that are gathered more, and may raise a `PdserveError`."""
        self._call = call
        self._prompt_tokens = prompt_tokens
        self._gather = gather
        self._texts = [call.prefix]
        self._tokens = 0
        self._finish_reason: FinishReason | None = None

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        self.add(delta)

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: nothing is written before the end."""
        return False

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        self._gather(len(delta.text))
        self._texts.append(delta.text)
        self._tokens += len(delta.ids)
        self._finish_reason = delta.finish_reason

    def values(self) -> dict[str, str | int]:
        """Take what is gathered, by the names of the outputs that the client asks for, in their order."""
        reason = self._finish_reason
        told: dict[str, str | int] = {
            "text_output": "".join(self._texts),
            "finish_reason": UNFINISHED if reason is None else reason.value,
            "num_input_tokens": self._prompt_tokens,
            "num_output_tokens": self._tokens,
        }
        self._texts, self._tokens = [], 0
        return {one.name: told[one.name] for one in self._call.outputs}


def generate_json(model: str, values: dict[str, str | int]) -> bytes:
    """Return an answer of the generate extension."""
    return encode_json({"model_name": model, "model_version": VERSION, **values})


def infer_body(model: str, call: InferCall, values: dict[str, str | int]) -> tuple[bytes, int | None]:
    """Return an answer with tensors, and the length of its JSON if binary tensors follow it."""
    outputs = []
    behind = b""
    for spec in call.outputs:
        value = values[spec.name]
        told: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(SHAPE)}
        if spec.name in call.binary:
            data = raw_element(value)
            behind += data
            told["parameters"] = {"binary_data_size": len(data)}
        else:
            told["data"] = [value]
        outputs.append(told)
    named = {"id": call.id} if call.id else {}
    body = encode_json({"model_name": model, "model_version": VERSION, **named, "outputs": outputs})
    return body + behind, len(body) if call.binary else None


def raw_element(value: str | int) -> bytes:
    """Return the binary form of a tensor with one element: BYTES of a text, UINT32 of a number."""
    if isinstance(value, int):
        return value.to_bytes(4, "little")
    text = value.encode(errors="replace")
    return len(text).to_bytes(4, "little") + text


def failure(error: PdserveError) -> dict[str, Any]:
    """Return an error in the protocol's shape, in which `error` is a text. `code` and `param` say more to programs."""
    return {
        "error": error.message,
        "code": error.code.value,
        "param": error.field if isinstance(error, InvalidRequest) else None,
    }
