"""The families by the architecture that published configurations name, and a family of the operator's own."""

from __future__ import annotations

from typing import Final

from pdserve.checkpoint.families.family import Family
from pdserve.core.errors import ConfigError
from pdserve.plugins import resolve

FAMILIES: Final = {
    "LlamaForCausalLM": "pdserve.checkpoint.families.llama:family",
    "DeciLMForCausalLM": "pdserve.checkpoint.families.decilm:family",
    "MistralForCausalLM": "pdserve.checkpoint.families.mistral:family",
    "Phi3ForCausalLM": "pdserve.checkpoint.families.mistral:phi3",
    "Qwen2ForCausalLM": "pdserve.checkpoint.families.qwen:qwen2",
    "Qwen3ForCausalLM": "pdserve.checkpoint.families.qwen:qwen3",
    "Qwen2MoeForCausalLM": "pdserve.checkpoint.families.qwen_moe:qwen2_moe",
    "Qwen3MoeForCausalLM": "pdserve.checkpoint.families.qwen_moe:qwen3_moe",
    "MixtralForCausalLM": "pdserve.checkpoint.families.mixtral:family",
    "Gemma2ForCausalLM": "pdserve.checkpoint.families.gemma:gemma2",
    "Gemma3ForCausalLM": "pdserve.checkpoint.families.gemma:gemma3",
    "Gemma3ForConditionalGeneration": "pdserve.checkpoint.families.gemma:gemma3_images",
    "DeepseekV2ForCausalLM": "pdserve.checkpoint.families.deepseek:deepseek_v2",
    "DeepseekV3ForCausalLM": "pdserve.checkpoint.families.deepseek:deepseek_v3",
}
"""The function that returns the family of an architecture, as `module:function`. Only the needed module is imported."""
REFUSED: Final = {"GptOssForCausalLM": "its attention has sinks, which no backend computes"}
"""Architectures that are known and not supported, each with the reason."""
SETTING: Final = "engine.model_family"


def family_of(architecture: str, setting: str | None = None) -> Family:
    """Return the family of an architecture, or the one that the setting `engine.model_family` names.

    Raises `ConfigError`: for an architecture that no family has, a setting that names no function with a family, and a family
    of another architecture.
    """
    if setting is None:
        if architecture in REFUSED:
            raise ConfigError(f"architecture {architecture} is not supported: {REFUSED[architecture]}")
        if architecture not in FAMILIES:
            raise ConfigError(f"architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}")
        setting = architecture
    family = resolve(setting, FAMILIES, SETTING)()
    if not isinstance(family, Family):
        raise ConfigError(f"{SETTING} is {setting!r}, and this function returned {family!r:.100}, not a Family")
    if family.architecture != architecture:
        raise ConfigError(f"{SETTING} is {setting!r}, a family of {family.architecture}, and the model is {architecture}")
    return family
