"""The vocabularies of the two models that every checkout has, made once."""

from __future__ import annotations

from functools import cache

import pytest

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.structured.compiler import Compiler
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer


@cache
def vocabulary_of(model: str) -> Vocabulary:
    directory = resolve(model)
    card = ModelCard.load(directory)
    return Vocabulary(Tokenizer.load(directory), card.vocab_size, card.eos_token_ids)


@cache
def tokenizer_of(model: str) -> Tokenizer:
    return Tokenizer.load(resolve(model))


@pytest.fixture(scope="session", params=["tiny", "default"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def vocabulary(model: str) -> Vocabulary:
    return vocabulary_of(model)


@pytest.fixture
def tokenizer(model: str) -> Tokenizer:
    return tokenizer_of(model)


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Compiler:
    return Compiler(vocabulary)
