"""The product y = x W^T, with a bias where there is one, and the schemes by which its weight is laid out once for its device.

Only this file knows how packed weights are made: a layer of the model holds a `Linear` and needs to know no more.

On x86 CPUs oneDNN with a prepacked weight is 1.3 to 3 times faster than `F.linear`. Its two operators are private to torch,
so they are tried once, and `F.linear` is used when they are missing. In float32, oneDNN sums all products of an output one
after the other, which moves the logits of SmolLM2 up to 1.2e-4 away from the reference. So in float32 the inputs are cut
into parts of PART_WIDTH, whose products are summed one by one. That gives 0.5e-4, against 0.7e-4 by `F.linear`, whose step
takes 1.2 to 1.6 times as long (one thread: decode B=1 41 ms against 34, B=32 171 against 121, a prompt of 512 tokens 1,366
against 906).

The bits of a row depend on the number of rows that are multiplied together, never on the place of the row or on the other
rows. So the caller gets batch invariance by choosing fixed row counts (see `rows.py`), not by another kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.errors import ConfigError

PART_WIDTH: Final = 288
"""Inputs of one part. Tried: 96, 144, 192, 288 and the whole width. 288 is the nearest to the reference and the fastest
except for the whole width."""
HEAD: Final = 4
"""The number of the head among the weights of `pdserve_model_weight` in abi.h."""
ROUTER: Final = 5
"""The number of the router in abi.h. Its weights are not rounded to fewer bits, because it decides."""
ABSORB: Final = 9
EXPAND: Final = 10
"""The numbers of the two parts of latent attention's expansion in abi.h. Their weights are not rounded to fewer bits: they are
9 % of DeepSeek-V3's attention, and the width of a head need not be a multiple of the group of weights that share a scale."""

Multiply = Callable[[Tensor], Tensor]
"""Function of a contiguous x [rows, in_features] that returns [rows, out_features] of the same dtype and device."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to hold a weight and to multiply by it in torch.

    lay_out: takes the weight [out_features, in_features] and returns the product. It may keep a copy instead of the weight.
    """

    name: str
    lay_out: Callable[[Tensor], Multiply]


class Linear:
    """A product with one weight, held as a scheme lays it out. A bias [out_features] is added to the rounded product."""

    __slots__ = ("_bias", "_multiply")

    def __init__(self, scheme: Scheme, weight: Tensor, bias: Tensor | None = None) -> None:
        self._multiply = scheme.lay_out(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, in_features], contiguous: [rows, out_features] of the same dtype and device."""
        product = self._multiply(x)
        return product if self._bias is None else product.add_(self._bias)


class LinearFor(Protocol):
    """Function that lays a weight and its bias out."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Multiply:
        """Return the product with them."""


@dataclass(frozen=True, slots=True)
class CompiledScheme:
    """A format in which the compiled code packs weights and multiplies by them.

    bits: bits of a weight: 16 (bfloat16), 8 (activations are rounded to 8 bits as well) or 4 (activations are bfloat16).
    head_bits: bits of a weight of the head. multiple: each width that is multiplied must be a multiple of this number.
    scale_bits: bits of scales for each weight of a layer, where they are not negligible.
    """

    name: str
    bits: int
    head_bits: int
    multiple: int = 1
    scale_bits: float = 0.0

    @property
    def products(self) -> torch.dtype:
        """The dtype of the numbers that are multiplied."""
        return torch.int8 if self.bits == 8 else torch.bfloat16

    def check(self, widths: Iterable[int]) -> None:
        """Raise `ConfigError` when a width does not allow this scheme."""
        if any(width % self.multiple for width in widths):
            raise ConfigError(f"quantization {self.name} needs a model whose widths are multiples of {self.multiple}")

    def pack(
        self,
        library: ctypes.CDLL,
        model: int,
        layer: int,
        which: int,
        weight: Tensor,
        part: int = 0,
        numbers: range | None = None,
    ) -> int:
        """Copy a weight into a compiled model and return the call's result. layer, which, part: as in abi.h. numbers: those of
        each row that are copied; None means all."""
        held = weight.contiguous()
        numbers = range(held.shape[1]) if numbers is None else numbers
        bits = {HEAD: self.head_bits, ROUTER: 16, ABSORB: 16, EXPAND: 16}.get(which, self.bits)
        result: int = library.pdserve_model_weight(
            model, layer, which, part, held.data_ptr(), *held.shape, numbers.start, len(numbers), bits
        )
        return result


COMPILED_SCHEMES: Final = {
    None: CompiledScheme("bf16", bits=16, head_bits=16),
    "int8": CompiledScheme("int8", bits=8, head_bits=8, multiple=64),  # 64 activations share a scale
    # A head of 4 bits costs SmolLM2 5 % of perplexity, a head of 8 bits costs nothing. 32 weights share a scale.
    "int4": CompiledScheme("int4", bits=4, head_bits=8, multiple=64, scale_bits=32 / 32),
}
"""The schemes of the compiled code by the setting `quantization`."""


def scheme_for(device: torch.device, dtype: torch.dtype) -> Scheme:
    """Return the fastest scheme of torch on a device."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and _packing_works(dtype):
        return IN_PARTS if dtype is torch.float32 else PACKED
    return PLAIN


def _plain(weight: Tensor) -> Multiply:
    def apply(x: Tensor) -> Tensor:
        return F.linear(x, weight)

    return apply


def _packed(weight: Tensor) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise

    def apply(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, None, "none", [], "")
        return result

    return apply


def _in_parts(weight: Tensor) -> Multiply:
    parts = [_packed(part.contiguous()) for part in torch.split(weight, PART_WIDTH, dim=1)]
    if len(parts) == 1:
        return parts[0]

    def apply(x: Tensor) -> Tensor:
        first, *others = (
            part(piece.contiguous()) for part, piece in zip(parts, torch.split(x, PART_WIDTH, dim=1), strict=True)
        )
        for other in others:
            first.add_(other)
        return first

    return apply


PLAIN: Final = Scheme("plain", _plain)
PACKED: Final = Scheme("packed by oneDNN", _packed)
IN_PARTS: Final = Scheme("packed by oneDNN, in parts", _in_parts)


def _packing_works(dtype: torch.dtype) -> bool:
    """Tell whether this torch and this CPU have the private operators for `dtype`, and whether they multiply correctly."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x = torch.eye(32, dtype=dtype)
    weight = torch.arange(32 * 32, dtype=torch.float32).remainder(7).to(dtype).view(32, 32)
    try:
        y = _packed(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(y, weight.t())
