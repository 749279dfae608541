"""The vocabularies of the two models that every checkout has, made once."""

from __future__ import annotations

from functools import cache

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
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
