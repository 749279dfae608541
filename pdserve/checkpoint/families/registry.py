"""The families by the architecture that published configurations name, and a family of the operator's own."""

from __future__ import annotations

from typing import Final

from pdserve.checkpoint.families.family import Family
from pdserve.core.errors import ConfigError
from pdserve.plugins import resolve

FAMILIES: Final = {
    "LlamaForCausalLM": "pdserve.checkpoint.families.llama:family",
    "DeciLMForCausalLM": "pdserve.checkpoint.families.decilm:family",
}
"""The function that returns the family of an architecture, as `module:function`. Only the one that is needed is imported."""
SETTING: Final = "engine.model_family"


def family_of(architecture: str, setting: str | None = None) -> Family:
    """Return the family of an architecture, or the one that the setting `engine.model_family` names.

    Raises `ConfigError`: for an architecture that no family has, a setting that names no function with a family, and a family
    of another architecture.
    """
    if setting is None:
        if architecture not in FAMILIES:
            raise ConfigError(f"architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}")
        setting = architecture
    family = resolve(setting, FAMILIES, SETTING)()
    if not isinstance(family, Family):
        raise ConfigError(f"{SETTING} is {setting!r}, and this function returned {family!r:.100}, not a Family")
    if family.architecture != architecture:
        raise ConfigError(f"{SETTING} is {setting!r}, a family of {family.architecture}, and the model is {architecture}")
    return family
