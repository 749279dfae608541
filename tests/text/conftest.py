"""The tokenizers of the two models that every checkout has, loaded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pdserve.checkpoint.resolve import resolve
from pdserve.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


@pytest.fixture(scope="session")
def tokenizer_of() -> dict[str, Tokenizer]:
    return {model: Tokenizer.load(resolve(model)) for model in ("tiny", "default")}


@pytest.fixture(scope="session")
def reference_of() -> dict[str, tokenizers.Tokenizer]:
    """The library's own reading of the same files."""
    return {model: tokenizers.Tokenizer.from_file(str(resolve(model) / "tokenizer.json")) for model in ("tiny", "default")}


@pytest.fixture(scope="session")
def default_text() -> dict[str, Any]:
    """What transformers makes of texts and chats with the default model's own tokenizer."""
    golden: dict[str, Any] = json.loads((GOLDENS / "default_text.json").read_text(encoding="utf-8"))
    return golden


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    return resolve("tiny")
