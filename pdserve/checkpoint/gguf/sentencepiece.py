"""The SentencePiece tokenizer (BPE) inside a GGUF file.

GGUF stores the pieces, their scores and their kinds. SentencePiece joins the two neighbours whose joined piece has the highest
score. Among equal scores it joins the leftmost pair. The library `tokenizers` has no scores: it joins the pair that stands
first in a list. So every way to make a piece of two others becomes such a pair, and the pairs are sorted by the score of the
piece.

A user-defined piece is never joined with its neighbours, and of several such pieces the longest counts. A character that is no
piece becomes its bytes in UTF-8.
"""

from __future__ import annotations

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, GgufVocabulary
from pdserve.core.errors import ConfigError

_SPACE: Final = "▁"  # SentencePiece writes it for a space
_BYTES: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_REFUSED: Final = ("add_eos_token", "remove_extra_whitespaces", "precompiled_charsmap")
"""Settings that change the ids, and that are not read. Files of these tokenizers have them false or empty."""


def read_vocabulary(gguf: GgufFile) -> GgufVocabulary:
    """Return the vocabulary. If the file does not say it, prompts begin with a token."""
    return GgufVocabulary.read(gguf, adds_bos=True)


def build(gguf: GgufFile, vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer. Raises `ConfigError` for a setting or a vocabulary that is not supported."""
    for name in _REFUSED:
        if gguf.get(f"tokenizer.ggml.{name}"):
            raise ConfigError(f"{gguf.path}: tokenizer.ggml.{name} is not supported")
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise ConfigError(f"{gguf.path}: its vocabulary has {len(vocabulary.tokens) - len(vocab)} tokens twice")
    if not _BYTES.issubset(token for token, _ in vocabulary.of_kind(BYTE)):
        raise ConfigError(f"{gguf.path}: its vocabulary lacks tokens for some bytes")
    prefix = bool(gguf.get("tokenizer.ggml.add_space_prefix", True))  # a space is added to the beginning of a text
    merges = _merges(vocabulary, gguf.require("tokenizer.ggml.scores"))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return vocabulary.finish(tokenizer, _added(gguf, vocabulary, prefix))


def _merges(vocabulary: GgufVocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a third piece, in descending order of the third piece's score.

    Two pairs that make the same piece can overlap: "ab" "a" and "a" "ba" in "ab" "a" "ba". Then the left pair must win. The
    right half of the left pair also begins the piece, so such pairs come before other pairs of that piece.

    All runs of spaces of Llama 2 and Mistral have one score. Among equal scores the leftmost pair wins, whatever it makes, so a
    run grows from its left end. A list with longer pieces first has the same effect: a piece that has grown goes on growing
    before a new piece begins.
    """
    scored = zip(vocabulary.tokens, vocabulary.kinds, scores, strict=True)
    pieces = {token: score for token, kind, score in scored if kind == NORMAL}
    ranked = [
        (-score, -len(token), not token.startswith(token[cut:]), token[:cut], token[cut:])
        for token, score in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _added(gguf: GgufFile, vocabulary: GgufVocabulary, prefix: bool) -> list[AddedToken]:
    """Return the tokens that are found in a text before all other steps, user-defined tokens included.

    Such a token may be a run of spaces. It is found in the normalised text, where a space has SentencePiece's sign, however the
    file writes it. If a prefix were added, the search would look for a prefix of the token too.
    """
    added = []
    for token, kind in vocabulary.of_kind(UNKNOWN, CONTROL, USER_DEFINED):
        text = kind == USER_DEFINED
        if text and prefix and (" " in token or _SPACE in token):
            raise ConfigError(f"{gguf.path}: the user-defined token {token!r} holds a space, which is not supported here")
        added.append(AddedToken(token, special=not text, normalized=text and not prefix))
    return added
