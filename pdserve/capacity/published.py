"""The sizes of a model from its published configuration (config.json), also of models that no engine here computes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.checkpoint.families.gemma import TEXT_DEFAULTS
from pdserve.checkpoint.numbers import integer, integers
from pdserve.core.errors import ConfigError
from pdserve.core.roofline import (
    AttentionShape,
    LayerShape,
    MlpShape,
    ModelShape,
    dense_mlp,
    gqa_attention,
    mla_attention,
    moe_mlp,
)
from pdserve.core.shards import Degrees

MOST_LAYERS: Final = 4096
MOST_EXPERTS: Final = 65536
_GATED: Final = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text", "deepseek_v2",
    "deepseek_v3", "phi3", "granite", "olmo2", "olmo3", "gpt_oss", "nemotron-nas",
})  # fmt: skip
_PLAIN: Final = {"gpt2": ("n_embd", "n_head", "n_positions"), "bloom": ("n_embed", "num_attention_heads", "seq_length")}
"""Models whose MLP has two matrices and four times the width, with their names of width, heads and positions."""
_TIED: Final = frozenset({"gemma2", "gemma3", "gemma3_text", "gpt2", "bloom"})
"""Models whose head is the embedding unless their configuration says otherwise."""
_PATTERNS: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""The default of `sliding_window_pattern`: each layer whose number is a multiple of it attends to all positions."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model, as far as capacity planning knows it."""

    name: str
    shape: ModelShape
    heads: int
    kv_heads: int
    """The fewest KV heads of a layer. Tensor parallelism beyond it stores KV several times."""
    latent: bool
    """KV is latent (MLA): each GPU of a worker stores all of it."""
    widest: int
    """The most numbers that a layer computes at once for one token: queries, keys and values, or gate and up."""
    max_position: int
    quantization: str = "none"
    """The quantization of the published weights: none, fp8, int8 or int4."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The numbers of routed experts that its layers have. Empty: it is no mixture of experts."""
        return tuple(sorted({layer.mlp.experts for layer, _ in self.shape.layers if layer.mlp.experts}))

    def shares_evenly(self, degrees: Degrees) -> bool:
        """Tell whether the ranks of a stage have equal shares: of query heads, of KV heads or of one KV head, of experts."""
        heads = self.heads % degrees.tensor == 0
        kv_heads = self.latent or self.kv_heads % degrees.tensor == 0 or degrees.tensor % self.kv_heads == 0
        return heads and kv_heads and not (degrees.experts and any(count % degrees.tensor for count in self.experts))

    def kv_copies(self, tp: int) -> float:
        """Return how many times a worker of `tp` GPUs stores each number of KV."""
        return float(tp) if self.latent else max(1.0, tp / self.kv_heads)


def read_model(name: str, config: Mapping[str, Any], num_kv_heads: int | None = None) -> PublishedModel:
    """Return the model of a published configuration.

    num_kv_heads: a what-if with fewer KV heads. Raises `ConfigError` that names a missing or wrong setting, an unknown kind of
    model, or a `--num-kv-heads` above the configuration's number.
    """
    try:
        return _read(name, _text_part(config), num_kv_heads)
    except KeyError as exc:
        raise ConfigError(f"config.json of {name} lacks {exc.args[0]}") from exc
    except ConfigError as exc:
        raise exc if exc.message.startswith("--") else ConfigError(f"config.json of {name}: {exc.message}") from exc
    except (ArithmeticError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError(f"config.json of {name} holds a value of the wrong type or size: {exc}") from exc


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration: models that see images nest it. Gemma 3 leaves its defaults out."""
    nested = config.get("text_config")
    defaults = TEXT_DEFAULTS if config.get("model_type") == "gemma3" else {}
    return {**config, **defaults, **nested} if isinstance(nested, dict) else config


def _read(name: str, config: Mapping[str, Any], num_kv_heads: int | None) -> PublishedModel:
    kind = config["model_type"]
    if kind in _PLAIN:
        return _read_plain(name, config, *_PLAIN[kind], num_kv_heads)
    if kind not in _GATED:
        raise ConfigError(f"model_type {kind!r:.60} is not known; known: {', '.join(sorted(_GATED | set(_PLAIN)))}")
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    layers = _layers_of(config, "num_hidden_layers")
    latent = bool(config.get("kv_lora_rank"))
    kv_heads = [1] * layers if latent else _kv_heads(config, heads, layers, num_kv_heads)
    if latent and num_kv_heads is not None:
        raise ConfigError(f"--num-kv-heads {num_kv_heads} has no meaning for {name}: its KV is one latent vector a token")
    head_dim = integer(config, "head_dim", max(1, hidden // heads))
    windows = _windows(config, layers)
    counts: Counter[LayerShape] = Counter()
    widest = 2 * integer(config, "intermediate_size", 1)
    for index in range(layers):
        attention = _mla(config, hidden, heads) if latent else gqa_attention(
            hidden, heads, kv_heads[index], head_dim, head_dim, window=windows[index]
        )  # fmt: skip
        counts[LayerShape(attention, _mlp(config, hidden, index))] += 1
        widest = max(widest, heads * head_dim + attention.kv_numbers)
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    shape = ModelShape(integer(config, "vocab_size"), hidden, tuple(counts.items()), tied)
    most = integer(config, "max_position_embeddings")
    return PublishedModel(name, shape, heads, min(kv_heads), latent, widest, most, _quantization(config))


def _read_plain(
    name: str, config: Mapping[str, Any], width: str, heads_name: str, positions: str, num_kv_heads: int | None
) -> PublishedModel:
    hidden, heads = integer(config, width), integer(config, heads_name)
    layers = _layers_of(config, "n_layer")
    kv_heads = _kv_heads(config, heads, layers, num_kv_heads)[0]
    head_dim = max(1, hidden // heads)
    layer = LayerShape(gqa_attention(hidden, heads, kv_heads, head_dim, head_dim), dense_mlp(hidden, 4 * hidden, gated=False))
    shape = ModelShape(integer(config, "vocab_size"), hidden, ((layer, layers),), True)
    return PublishedModel(name, shape, heads, kv_heads, False, 4 * hidden, integer(config, positions), _quantization(config))


def _layers_of(config: Mapping[str, Any], key: str) -> int:
    layers = integer(config, key)
    if layers > MOST_LAYERS:
        raise ConfigError(f"{key} {layers} is over the limit of {MOST_LAYERS}")
    return layers


def _kv_heads(config: Mapping[str, Any], heads: int, layers: int, manual: int | None) -> list[int]:
    if "num_key_value_heads_per_layer" in config:
        found = integers(config, "num_key_value_heads_per_layer", layers)
    else:
        found = [integer(config, "num_key_value_heads", heads)] * layers
    for count in found:
        if heads % count:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {count}")
    if manual is None:
        return found
    if manual > min(found):
        raise ConfigError(
            f"--num-kv-heads {manual} is more than the {min(found)} KV heads (num_key_value_heads) of config.json"
        )
    if manual < 1 or heads % manual:
        raise ConfigError(f"--num-kv-heads must divide the {heads} query heads (num_attention_heads), got {manual}")
    return [manual] * layers


def _windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Return the window of each layer. None: the layer attends to everything."""
    kind = config["model_type"]
    if not config.get("sliding_window") or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return [None] * layers
    window = integer(config, "sliding_window")
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(f"layer_types must be a list of {layers} names, got {types!r:.60}")
        return [window if one == "sliding_attention" else None for one in types]
    if kind.startswith("qwen"):
        first = integer(config, "max_window_layers", 0) if config.get("max_window_layers") else 0
        return [window if index >= first else None for index in range(layers)]
    pattern = config.get("sliding_window_pattern", _PATTERNS.get(kind))
    if pattern is None:
        return [window] * layers
    every = integer({"sliding_window_pattern": pattern}, "sliding_window_pattern")
    return [None if (index + 1) % every == 0 else window for index in range(layers)]


def _mla(config: Mapping[str, Any], hidden: int, heads: int) -> AttentionShape:
    return mla_attention(
        hidden,
        heads,
        q_rank=integer(config, "q_lora_rank") if config.get("q_lora_rank") else None,
        kv_rank=integer(config, "kv_lora_rank"),
        nope_dim=integer(config, "qk_nope_head_dim"),
        rope_dim=integer(config, "qk_rope_head_dim"),
        v_dim=integer(config, "v_head_dim"),
    )


def _mlp(config: Mapping[str, Any], hidden: int, index: int) -> MlpShape:
    experts_name = next((key for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key)), None)
    if experts_name is None or _is_dense(config, index):
        return dense_mlp(hidden, integer(config, "intermediate_size"))
    experts, chosen = integer(config, experts_name), integer(config, "num_experts_per_tok")
    if experts > MOST_EXPERTS or chosen > experts:
        raise ConfigError(f"num_experts_per_tok {chosen} of {experts_name} {experts}: at most {min(experts, MOST_EXPERTS)}")
    width = integer(config, "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size")
    gated = bool(config.get("shared_expert_intermediate_size"))
    shared = integer(config, "shared_expert_intermediate_size") if gated else 0
    if config.get("n_shared_experts"):
        shared = integer(config, "n_shared_experts") * width
    return moe_mlp(hidden, width, experts=experts, experts_per_token=chosen, shared=shared, shared_gate=gated)


def _is_dense(config: Mapping[str, Any], index: int) -> bool:
    """Tell whether a layer of a model with experts has a plain MLP."""
    only = config.get("mlp_only_layers") or []
    step = integer(config, "decoder_sparse_step", 1)
    first = integer(config, "first_k_dense_replace") if config.get("first_k_dense_replace") else 0
    every = integer(config, "moe_layer_freq", 1)
    return index < first or index in only or (index + 1) % step != 0 or index % every != 0


def _quantization(config: Mapping[str, Any]) -> str:
    """Return how the published weights are quantised. Raises `ConfigError` for a format whose size is not known."""
    found = config.get("quantization_config")
    if not found:
        return "none"
    method, bits = found.get("quant_method"), found.get("bits")
    if method == "fp8":
        return "fp8"
    if method in ("gptq", "awq") and bits in (4, 8):
        return "int4" if bits == 4 else "int8"
    raise ConfigError(f"quantization_config {found!r:.60} is not known; remove it and set --quantization")
