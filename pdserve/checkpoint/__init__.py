"""Checkpoints: where a model's files come from, what they say of the model, and how families of models are read."""

__all__ = [
    "cache",
    "card",
    "families",
    "fingerprint",
    "gguf",
    "hub",
    "layout",
    "numbers",
    "origin",
    "progress",
    "resolve",
    "shards",
    "tiny",
]
