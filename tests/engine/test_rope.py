"""Rotary tables against the reference implementation's own frequencies."""

from __future__ import annotations

import pytest
import torch

from pdserve.core.model_spec import Llama3Scaling, RopeSpec
from pdserve.engine.layers.rope import rope_table, rotate

SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=512)


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_tables_and_rotation_equal_the_reference(scaling):
    from transformers import LlamaConfig  # takes seconds, and each test process collects every file
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    spec = RopeSpec(500000.0, scaling)
    rope = {"rope_type": "default", "rope_theta": spec.theta}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": spec.theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    config = LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=rope)
    positions = torch.tensor([0, 1, 77, 600, 4000])
    query = torch.randn(5, 3, 64)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin)
    table = rope_table(spec, 64, 4096, torch.device("cpu"))
    torch.testing.assert_close(rotate(query, table[positions]), expected[0].transpose(0, 1), atol=2e-4, rtol=0)
