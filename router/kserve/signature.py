"""The fixed signature of the served model: its tensors, as its metadata tells them to clients.

Names and types are those of Triton's vLLM backend (triton-inference-server/vllm_backend, src/model.py), so its clients work
unchanged. Each tensor has one element, because one request has one prompt: batches are made in the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pdserve import __version__
from pdserve.core.errors import UnknownModel
from router.openai.json import show

VERSION: Final = "1"
"""The one version of the model: Triton gives it to a model that names none."""
PLATFORM: Final = "pdserve"
SERVER: Final = "pdserve"
EXTENSIONS: Final = ("binary_tensor_data", "parameters", "generate")
"""The extensions of Triton's that this server has, by Triton's names."""
SHAPE: Final = (1,)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the signature. `datatype` is BYTES (UTF-8), BOOL or UINT32."""

    name: str
    datatype: str


INPUTS: Final = tuple(
    TensorSpec(*one)
    for one in (
        ("text_input", "BYTES"),
        ("stream", "BOOL"),
        ("sampling_parameters", "BYTES"),
        ("exclude_input_in_output", "BOOL"),
        ("return_finish_reason", "BOOL"),
        ("return_num_input_tokens", "BOOL"),
        ("return_num_output_tokens", "BOOL"),
    )
)
"""Only the first one is required."""
OUTPUTS: Final = tuple(
    TensorSpec(*one)
    for one in (
        ("text_output", "BYTES"),
        ("finish_reason", "BYTES"),
        ("num_input_tokens", "UINT32"),
        ("num_output_tokens", "UINT32"),
    )
)
"""The first one is always there unless the request lists other outputs. `return_` before its name asks for another one."""


def server_metadata() -> dict[str, Any]:
    """Return what the server tells of itself."""
    return {"name": SERVER, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(name: str) -> dict[str, Any]:
    """Return what the server tells of the served model."""
    told = {
        kind: [{"name": one.name, "datatype": one.datatype, "shape": list(SHAPE)} for one in tensors]
        for kind, tensors in (("inputs", INPUTS), ("outputs", OUTPUTS))
    }
    return {"name": name, "versions": [VERSION], "platform": PLATFORM, **told}


def check_model(served: str, model: str, version: str = "") -> None:
    """Check that a client means the served model. `version`: empty means any. Raises `UnknownModel`."""
    if model != served:
        raise UnknownModel(f"model: {show(model)} is not served here; {show(served)} is", field="model")
    if version not in ("", VERSION):
        raise UnknownModel(f"version: {show(version)} is not served here; {show(VERSION)} is", field="version")
