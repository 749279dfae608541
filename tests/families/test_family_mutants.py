"""Known mistakes, made on purpose, each change the logits by far more than the comparison with transformers tolerates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_models import Sheet
from test_family_logits import TOLERANCE

from pdserve.core.model_spec import LayerSpec, ModelSpec, MoeSpec
from pdserve.engine.layers import moe
from pdserve.engine.layers.gqa import GqaPart
from pdserve.engine.layers.rope import rotate
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models.weights import LayerWeights, ModelWeights, MoeWeights

Mutation = Callable[[LayerSpec, LayerWeights], tuple[LayerSpec, LayerWeights]]


def attention(**changes: Any) -> Mutation:
    """Change fields of the spec of attention. A function gets the old value."""
    return lambda spec, weights: (replace(spec, attention=edited(spec.attention, changes)), weights)


def mlp(**changes: Any) -> Mutation:
    """Change fields of the spec of mixtures."""

    def change(spec: LayerSpec, weights: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
        return (replace(spec, mlp=edited(spec.mlp, changes)) if isinstance(spec.mlp, MoeSpec) else spec), weights

    return change


def layer(**changes: Any) -> Mutation:
    """Change fields of the spec of layers."""
    return lambda spec, weights: (edited(spec, changes), weights)


def stored(part: str, **changes: Any) -> Mutation:
    """Change weights: those of "attention", of "mlp" where it is a mixture, or of the layer itself."""

    def change(spec: LayerSpec, weights: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
        if part == "layer":
            return spec, edited(weights, changes)
        held = getattr(weights, part)
        return spec, (
            weights if part == "mlp" and not isinstance(held, MoeWeights) else replace(weights, **{part: edited(held, changes)})
        )

    return change


def both(first: Mutation, second: Mutation) -> Mutation:
    """Do one after the other."""
    return lambda spec, weights: second(*first(spec, weights))


def edited(held: Any, changes: dict[str, Any]) -> Any:
    """Return a dataclass with fields changed."""
    return replace(held, **{name: new(getattr(held, name)) if callable(new) else new for name, new in changes.items()})


def rope(**changes: Any) -> Mutation:
    """Change fields of the rotary positions."""
    return attention(rope=lambda old: edited(old, changes))


def scaling(**changes: Any) -> Mutation:
    """Change fields of the scaling of rotary positions, or drop it."""
    return rope(scaling=lambda old: None if old is None or not changes else edited(old, changes))


def neighbours(spec: LayerSpec, weights: LayerWeights) -> tuple[LayerSpec, LayerWeights]:
    """Sort the rows of each head of queries and keys, so that rows 2i and 2i + 1 are turned together."""
    heads, dim = spec.attention.heads + spec.attention.kv_heads, spec.attention.qk_dim
    rotated, rest = weights.attention.qkv.split([heads * dim, spec.attention.kv_heads * dim])
    pairs = rotated.view(heads, dim // 2, 2, -1).transpose(1, 2).flatten(0, 2)
    return spec, replace(weights, attention=replace(weights.attention, qkv=torch.cat((pairs, rest))))


def widest(old: Any) -> Any:
    """Return the rotary positions of Gemma's global layers for its local ones too."""
    return replace(old, theta=1e5)


def swap_gate_and_up(joined: torch.Tensor) -> torch.Tensor:
    """Return fused rows with the gate where `up` should be."""
    return joined.roll(joined.shape[-2] // 2, -2)


LAYERS: dict[str, tuple[str, Mutation]] = {
    "one position too many in a window": ("mistral", attention(window=lambda old: old + 1)),
    "one position too few in a window": ("mistral", attention(window=lambda old: old - 1)),
    "no window": ("phi3", attention(window=None)),
    "a window in the layers without one": ("qwen2", attention(window=11)),
    "local layers made global": ("gemma3", attention(window=None)),
    "local and global layers exchanged": ("gemma2", attention(window=lambda old: None if old else 12)),
    "one position too many in local layers": ("gemma3", attention(window=lambda old: old and old + 1)),
    "one position too few in the later layers": ("qwen2", attention(window=lambda old: old and old - 1)),
    "all of a head is rotated": ("phi3", rope(dim=None)),
    "neighbours are rotated, not halves": ("llama", neighbours),
    "halves are rotated, not neighbours": ("deepseek-v3", rope(neighbours=False)),
    "halves are rotated in the older one too": ("deepseek-v2", rope(neighbours=False)),
    "another theta": ("qwen3", rope(theta=1e4)),
    "one theta for local and global layers": ("gemma3", attention(rope=widest)),
    "no scaling of positions": ("llama-biased", scaling()),
    "no linear scaling": ("gemma3", scaling()),
    "no yarn": ("qwen3", scaling()),
    "no attention factor of yarn": ("qwen3", scaling(attention_factor=1.0)),
    "no ratio of both mscales": ("deepseek-v2", scaling(attention_factor=1.0)),
    "no mscale in the scores": ("deepseek-v2", attention(scale=None)),
    "no mscale in the scores of the later one": ("deepseek-v3", attention(scale=None)),
    "mscale once, not squared": ("deepseek-v3", attention(scale=lambda old: (old * 24**-0.5) ** 0.5)),
    "the eps of the model in latent norms": ("deepseek-v3", attention(norm=lambda old: replace(old, eps=1e-2))),
    "the eps of the model in the norm of KV alone": ("deepseek-v2-lite", attention(norm=lambda old: replace(old, eps=1e-2))),
    "another eps": ("llama", layer(norms=lambda old: replace(old, eps=1e-5))),
    "another eps of head norms": ("qwen3", attention(qk_norm=lambda old: replace(old, eps=1e-6))),
    "norms without the one": ("gemma2", layer(norms=lambda old: replace(old, offset=0.0))),
    "head norms without the one": ("gemma3", attention(qk_norm=lambda old: replace(old, offset=0.0))),
    "no head norms": ("qwen3", both(attention(qk_norm=None), stored("attention", q_norm=None, k_norm=None))),
    "no norms after attention and MLP": (
        "gemma3", both(layer(post_norms=False), stored("layer", post_attention_norm=None, post_mlp_norm=None))),
    "the scale of the head, not that of the model": ("gemma2", attention(scale=None)),
    "no query_pre_attn_scalar": ("gemma3", attention(scale=None)),
    "the scale of hidden / heads": ("qwen3", attention(scale=16**-0.5)),
    "no bound of scores": ("gemma2", attention(softcap=None)),
    "another function of the gate": ("gemma3", layer(mlp=lambda old: replace(old, activation="silu"))),
    "no biases": ("qwen2", both(attention(bias=False), stored("attention", qkv_bias=None))),
    "no biases beside experts": ("qwen2-moe", both(attention(bias=False), stored("attention", qkv_bias=None))),
    "no bias of the result": ("llama-biased", both(attention(out_bias=False), stored("attention", out_bias=None))),
    "gate and up swapped in experts": ("mixtral", stored("mlp", gate_up=swap_gate_and_up)),
    "weights not renormalised": ("mixtral", mlp(renormalise=False)),
    "weights not renormalised as norm_topk_prob asks": ("qwen3-moe", mlp(renormalise=False)),
    "weights of a sigmoid not renormalised": ("deepseek-v3", mlp(renormalise=False)),
    # A softmax after the choice, over the chosen experts alone, is the one before it, renormalised.
    "softmax after the choice of experts": ("qwen2-moe", mlp(renormalise=True)),
    "softmax after the choice of groups and experts": ("deepseek-v2", mlp(renormalise=True)),
    "one expert too few": ("qwen3-moe", mlp(experts_per_token=2)),
    "no gate of the shared expert": ("qwen2-moe", both(mlp(shared_gate=False), stored("mlp", shared_gate=None))),
    "no shared expert": ("deepseek-v2-lite", both(mlp(shared=0), stored("mlp", shared=None))),
    "no routed scaling factor": ("deepseek-v3", mlp(scale=1.0)),
    "no routed scaling factor without renormalisation": ("deepseek-v2", mlp(scale=1.0)),
    "softmax, not sigmoid": ("deepseek-v3", mlp(score="softmax")),
    "no correction of the choice": ("deepseek-v3", both(mlp(correction_bias=False), stored("mlp", router_bias=None))),
    "no groups": ("deepseek-v2", mlp(groups=1, top_groups=1)),
    "the best score of a group, not its best two": ("deepseek-v3", mlp(group_score="best")),
    "the best two scores of a group, not the best": ("deepseek-v2", mlp(group_score="best_two")),
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "no scale of the embedding": ("gemma3", {"embedding_scale": 1.0}),
    "no scale of the earlier embedding": ("gemma2", {"embedding_scale": 1.0}),
    "no bound of logits": ("gemma3", {"softcap": None}),
    "no bound of the earlier logits": ("gemma2", {"softcap": None}),
    "the last norm without the one": ("gemma2", {"norm": lambda old: replace(old, offset=0.0)}),
}


def mutated(spec: ModelSpec, weights: ModelWeights, change: Mutation) -> tuple[ModelSpec, ModelWeights]:
    pairs = [change(*pair) for pair in zip(spec.layers, weights.layers, strict=True)]
    specs, held = zip(*pairs, strict=True)
    return replace(spec, layers=specs), replace(weights, layers=held)


def error_of(model, spec: ModelSpec, weights: ModelWeights) -> float:
    runner = model.runner(spec, weights)
    return model.error(runner.logits(Sheet.of(runner, model.ids).whole()))


def held_by(model) -> ModelWeights:
    return load_weights(model.directory, model.card, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", LAYERS)
def test_a_mistake_in_layers_is_seen(made, name):
    model = made(LAYERS[name][0])
    spec, weights = mutated(model.card.spec, held_by(model), LAYERS[name][1])
    assert error_of(model, spec, weights) > 10 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_mistake_around_layers_is_seen(made, name):
    model = made(MODELS[name][0])
    assert error_of(model, edited(model.card.spec, MODELS[name][1]), held_by(model)) > 10 * TOLERANCE


def test_a_correction_that_weighs_is_seen(made, monkeypatch):
    """The bias of DeepSeek-V3 corrects the choice of experts, not their weights."""
    right = moe.route

    def wrong(spec: MoeSpec, outputs: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts, _ = right(spec, outputs, bias)
        weights = (outputs.sigmoid() + bias).gather(1, experts)
        return experts, weights / weights.sum(-1, keepdim=True) * spec.scale

    model = made("deepseek-v3")
    monkeypatch.setattr(moe, "route", wrong)
    assert error_of(model, model.card.spec, held_by(model)) > 10 * TOLERANCE


def test_heads_that_are_normed_after_they_are_rotated_are_seen(made, monkeypatch):
    """Qwen3 norms them before. A norm with equal weights would not show it."""

    def write(
        self: GqaPart, at: int, projected: tuple[torch.Tensor, ...], table: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        *heads, value = projected[0][: len(table)].split(self._widths, 1)
        late = [
            self._by_head(rotate(part.view(len(table), -1, len(norm.weight)), table).flatten(1), norm)
            for part, norm in zip(heads, (self._norms.query, self._norms.key), strict=True)
        ]
        still = torch.stack((torch.ones_like(table[:, 0]), torch.zeros_like(table[:, 1])), 1)
        return self._ops.rotate_and_write(at, torch.cat((*late, value), 1), still, slots)

    model = made("qwen3")
    monkeypatch.setattr(GqaPart, "before", lambda self, normed: (self._qkv(normed),))
    monkeypatch.setattr(GqaPart, "write", write)
    assert error_of(model, model.card.spec, held_by(model)) > 10 * TOLERANCE
