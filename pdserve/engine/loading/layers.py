"""The weights of one layer, read by the names of its parts and fused as decoders take them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pdserve.core.model_spec import AttentionSpec, LayerSpec, MlaSpec, MoeSpec
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, MlaWeights, MoeWeights


class ReadPart(Protocol):
    """A way to read parts of one layer into one new tensor, joined along the first dimension."""

    def __call__(self, *parts: str, experts: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the parts.

        experts: the number of experts, which become the first dimension; None: the parts belong to no expert. dtype: None means
        the model's dtype.
        """


def read_layer(read: ReadPart, spec: LayerSpec) -> LayerWeights:
    """Read one layer."""
    attention = _mla(read, spec.attention) if isinstance(spec.attention, MlaSpec) else _gqa(read, spec.attention)
    return LayerWeights(
        attention_norm=read("attention_norm"),
        attention=attention,
        mlp_norm=read("mlp_norm"),
        mlp=_moe(read, spec.mlp) if isinstance(spec.mlp, MoeSpec) else _dense(read, ""),
        post_attention_norm=read("post_attention_norm") if spec.post_norms else None,
        post_mlp_norm=read("post_mlp_norm") if spec.post_norms else None,
    )


def _gqa(read: ReadPart, spec: AttentionSpec) -> GqaWeights:
    return GqaWeights(
        qkv=read("q", "k", "v"),
        out=read("attention_out"),
        qkv_bias=read("q_bias", "k_bias", "v_bias") if spec.bias else None,
        out_bias=read("attention_out_bias") if spec.out_bias else None,
        q_norm=read("q_norm") if spec.qk_norm is not None else None,
        k_norm=read("k_norm") if spec.qk_norm is not None else None,
    )


def _mla(read: ReadPart, spec: MlaSpec) -> MlaWeights:
    latent = spec.q_rank is not None
    return MlaWeights(
        q=read("q_b" if latent else "q"),
        kv_a=read("kv_a"),
        kv_a_norm=read("kv_a_norm"),
        kv_b=read("kv_b"),
        out=read("attention_out"),
        q_a=read("q_a") if latent else None,
        q_a_norm=read("q_a_norm") if latent else None,
    )


def _dense(read: ReadPart, prefix: str) -> DenseWeights:
    return DenseWeights(gate_up=read(f"{prefix}gate", f"{prefix}up"), down=read(f"{prefix}down"))


def _moe(read: ReadPart, spec: MoeSpec) -> MoeWeights:
    return MoeWeights(
        router=read("router"),
        gate_up=read("expert_gate", "expert_up", experts=spec.experts),
        down=read("expert_down", experts=spec.experts),
        router_bias=read("router_bias", dtype=torch.float32) if spec.correction_bias else None,
        shared=_dense(read, "shared_") if spec.shared else None,
        shared_gate=read("shared_expert_gate") if spec.shared_gate else None,
    )
