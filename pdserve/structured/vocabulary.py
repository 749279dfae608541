"""The tokens of a model as the compiler of grammars sees them: as bytes, exactly those that the output's text is made of."""

from __future__ import annotations

from typing import cast

import llguidance

from pdserve.text.tokenizer import Tokenizer


class Vocabulary:
    """The tokens of one model. It makes `tokens`, the object that the library compiles against. Immutable."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the number of the model's logits. Ids without a token, of which a model may have some at its end, are
        never allowed. `eos_token_ids` end an output that the grammar accepts."""
        self._tokenizer = tokenizer
        self.size = vocab_size
        self.eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        spelled = [tokenizer.written_bytes(token_id) for token_id in range(vocab_size)]
        self._spelled = spelled
        wrapper = _Wrapper(self, spelled)
        reads = cast(llguidance.TokenizerWrapper, wrapper)  # which the library knows by its attributes alone
        self.tokens = llguidance.LLTokenizer(reads, eos_token=list(self.eos_token_ids) or None)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the grammar forces. Their bytes are those of the text.

        These are the tokens that the model was trained on, where the tokenizer can encode a text in the middle of another one.
        Tokenizers of Llama 2 write a space in front of each text, and then the longest tokens are taken instead.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode():
            return ids
        return list(self.tokens.greedy_tokenize(text))

    @property
    def special_ids(self) -> list[int]:
        """The ids of special tokens, which have a spelling in prompts and add nothing to a text."""
        return [
            token_id for token_id, spelled in enumerate(self._spelled) if spelled and not self._tokenizer.token_bytes(token_id)
        ]


class _Wrapper:
    """The attributes by which the library reads a tokenizer that is not its own (`PyTokenizer` of its python_ext/src/py.rs)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, spelled: list[bytes]) -> None:
        self.tokens = spelled
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else None
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)
