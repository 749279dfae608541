"""Text that a grammar forces is drafted."""

from __future__ import annotations

import json

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.core.ids import SeqId
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.engine.drafting.api import NO_DRAFT, DraftView
from pdserve.engine.drafting.forced import ForcedDrafter
from pdserve.structured.compilations import GrammarSource
from pdserve.text.tokenizer import Tokenizer


def test_a_key_that_must_come_is_drafted_up_to_the_limit():
    directory = resolve("tiny")
    card, tokenizer = ModelCard.load(directory), Tokenizer.load(directory)
    schema = {"type": "object", "properties": {"account": {"type": "integer"}}, "required": ["account"]}
    source = GrammarSource(tokenizer, card.vocab_size, card.eos_token_ids)
    grammar = source.start(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    grammar.catch_up(known := tokenizer.encode('{"ac', add_special_tokens=False), 0)
    constrained, free = DraftView(SeqId(1), known, 0, b"", 16, grammar), DraftView(SeqId(2), known, 0, b"", 16)
    draft, none = ForcedDrafter().propose([constrained, free])
    assert none is NO_DRAFT
    assert '{"account"'.startswith(tokenizer.decode([*known, *draft.token_ids]))
    assert len(draft.token_ids) > 1
    (short, _) = ForcedDrafter().propose([constrained._replace(most=1), free])
    assert short.token_ids == draft.token_ids[:1]
    assert ForcedDrafter().propose([free]) == [NO_DRAFT]
