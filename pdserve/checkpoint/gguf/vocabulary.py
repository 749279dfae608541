"""The vocabulary in a GGUF file: its tokens, their kinds, and the tokens with a meaning of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Tokenizer, processors

from pdserve.checkpoint.gguf.file import GgufFile

NORMAL: Final = 1  # values of tokenizer.ggml.token_type
UNKNOWN: Final = 2
CONTROL: Final = 3  # a special token, which is never part of the text
USER_DEFINED: Final = 4  # a token that was added to the vocabulary but is ordinary text
BYTE: Final = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens by id with their kinds, and the token, as (text, id), with which every prompt begins. None: there is none."""

    tokens: list[str]
    kinds: list[int]
    bos: tuple[str, int] | None

    @classmethod
    def read(cls, gguf: GgufFile, *, adds_bos: bool) -> GgufVocabulary:
        """Read the vocabulary. adds_bos: whether prompts begin with a token of their own, if the file does not say it."""
        tokens: list[str] = gguf.require("tokenizer.ggml.tokens")
        bos_id = gguf.get("tokenizer.ggml.bos_token_id")
        wanted = gguf.get("tokenizer.ggml.add_bos_token", adds_bos) and bos_id is not None
        return cls(tokens, gguf.get("tokenizer.ggml.token_type", []), (tokens[bos_id], bos_id) if wanted else None)

    def of_kind(self, *kinds: int) -> list[tuple[str, int]]:
        """Return the tokens of some kinds, each with its kind. A file may have no kinds: then there are no such tokens."""
        return [(token, kind) for token, kind in zip(self.tokens, self.kinds, strict=False) if kind in kinds]

    def finish(self, tokenizer: Tokenizer, added: list[AddedToken]) -> Tokenizer:
        """Give a tokenizer its added tokens and the token with which prompts begin."""
        tokenizer.add_tokens(added)
        if self.bos is not None:
            tokenizer.post_processor = processors.TemplateProcessing(single=f"{self.bos[0]} $A", special_tokens=[self.bos])
        return tokenizer
