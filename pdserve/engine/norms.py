"""Norms with their weights, as layers and kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pdserve.core.model_spec import NormSpec


class Norm(NamedTuple):
    """An RMSNorm: its weight [width], and the settings of its `NormSpec`."""

    weight: Tensor
    eps: float
    offset: float

    @classmethod
    def of(cls, spec: NormSpec, weight: Tensor) -> Norm:
        """Return the norm of a spec."""
        return cls(weight, spec.eps, spec.offset)


class HeadNorms(NamedTuple):
    """The norms of each head of queries and of keys. Both norms have the same eps and offset."""

    query: Norm
    key: Norm
