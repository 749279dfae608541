"""The models that every checkout has, one after the other."""

from __future__ import annotations

import pytest
from vocabularies import tokenizer_of, vocabulary_of

from pdserve.structured.compiler import Compiler
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer


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
