"""The MLP blocks of the reference implementation in float64, with all of their parameters random."""

from __future__ import annotations

import pytest
import torch
from moe_reference import Weights
from torch import Tensor, nn

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.layers.rows import WholeRows

pytestmark = pytest.mark.slow  # transformers takes seconds to import; tests/families compare whole models
HIDDEN, INNER = 32, 24
COMMON = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "_experts_implementation": "eager"}
DEEPSEEK = {
    **COMMON, "moe_intermediate_size": INNER, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
}  # fmt: skip
QWEN = {**COMMON, "num_experts": 8, "moe_intermediate_size": INNER}


def mixtral() -> tuple[nn.Module, MoeSpec]:
    from transformers.models.mixtral import modeling_mixtral as reference

    config = reference.MixtralConfig(**COMMON, num_local_experts=8, intermediate_size=INNER)
    return reference.MixtralSparseMoeBlock(config), MoeSpec(8, 3, INNER)


def qwen2() -> tuple[nn.Module, MoeSpec]:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as reference

    config = reference.Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=40, norm_topk_prob=False)
    spec = MoeSpec(8, 3, INNER, renormalise=False, shared=40, shared_gate=True)
    return reference.Qwen2MoeSparseMoeBlock(config), spec


def qwen3(renormalise: bool) -> tuple[nn.Module, MoeSpec]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as reference

    config = reference.Qwen3MoeConfig(**QWEN, norm_topk_prob=renormalise)
    return reference.Qwen3MoeSparseMoeBlock(config), MoeSpec(8, 3, INNER, renormalise=renormalise)


def deepseek_v2(method: str) -> tuple[nn.Module, MoeSpec]:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as reference

    config = reference.DeepseekV2Config(**DEEPSEEK, topk_method=method, routed_scaling_factor=1.7)
    groups = {"groups": 4, "top_groups": 2} if method == "group_limited_greedy" else {}
    return reference.DeepseekV2Moe(config), MoeSpec(8, 3, INNER, renormalise=False, scale=1.7, shared=2 * INNER, **groups)


def deepseek_v3() -> tuple[nn.Module, MoeSpec]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference

    config = reference.DeepseekV3Config(**DEEPSEEK, norm_topk_prob=True, routed_scaling_factor=2.5)
    groups = {"groups": 4, "top_groups": 2, "group_score": "best_two"}
    return reference.DeepseekV3MoE(config), MoeSpec(8, 3, INNER, "sigmoid", True, 2.5, True, **groups, shared=2 * INNER)


BLOCKS = {
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": lambda: qwen3(False),
    "qwen3 renormalised": lambda: qwen3(True),
    "deepseek v2": lambda: deepseek_v2("greedy"),
    "deepseek v2 in groups": lambda: deepseek_v2("group_limited_greedy"),
    "deepseek v3": deepseek_v3,
}


def weights_of(spec: MoeSpec, state: dict[str, Tensor]) -> Weights:
    """Return the block's parameters. They were drawn in float32, so nothing is rounded."""
    own = {name: tensor.float() for name, tensor in state.items()}
    prefix = next((name.split(".")[0] for name in own if name.startswith("shared_expert") and "_proj" in name), None)
    gate = [own["shared_expert_gate.weight"]] if spec.shared_gate else []
    shared = None
    if prefix:
        pair = torch.cat([own[f"{prefix}.gate_proj.weight"], own[f"{prefix}.up_proj.weight"]])
        shared = (pair, own[f"{prefix}.down_proj.weight"])
    return Weights(
        spec,
        torch.cat([own["gate.weight"], *gate]),
        own.get("gate.e_score_correction_bias"),
        own["experts.gate_up_proj"],
        own["experts.down_proj"],
        shared,
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_a_layer_equals_the_block_of_the_reference(name):
    block, spec = BLOCKS[name]()
    generator = torch.Generator().manual_seed(8)
    for tensor in block.state_dict().values():
        scale = 1.0 if tensor.dim() == 1 else 2 / tensor.shape[-1] ** 0.5
        tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    x = torch.randn(60, HIDDEN, generator=generator)
    with torch.no_grad():
        expected = block.double()(x.double().unsqueeze(0))[0]
    weights, rows = weights_of(spec, block.state_dict()), WholeRows()
    found = weights.layer(rows)(x, len(x))
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()
    assert (weights.loop(x) - expected).abs().max() < 1e-6 * expected.abs().max(), "the reference routes in float32"
