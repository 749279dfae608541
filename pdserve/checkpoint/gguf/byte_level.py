"""The byte-level BPE tokenizer inside a GGUF file.

GGUF stores the vocabulary and the merges. Of the rule that splits text into words before merging it stores only the *name*, in
`tokenizer.ggml.pre`. The rules here come from the models' tokenizer.json. The right rule matters: SmolLM isolates digits before
it looks at white space, so that in "\\n\\n1" the two line ends are one token. With GPT-2's rule they would be two tokens, which
the model has hardly seen at such places. (transformers 5.23, when it reads a GGUF, knows most of the names but not SmolLM's,
and takes GPT-2's rule.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.vocabulary import CONTROL, USER_DEFINED, GgufVocabulary
from pdserve.core.errors import ConfigError

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule by which one family of models splits text. `split` None: GPT-2's rule, which the byte-level step has."""

    split: str | None = None
    isolate_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is one token of the vocabulary is taken without merging

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.isolate_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return pre_tokenizers.Sequence(steps)


_RULES: Final = {
    "default": _Rule(),
    "gpt-2": _Rule(),
    "smollm": _Rule(isolate_digits=True),
    "llama-bpe": _Rule(split=_LLAMA3_SPLIT, ignore_merges=True),
    "qwen2": _Rule(split=_QWEN2_SPLIT, nfc=True),
}


def read_vocabulary(gguf: GgufFile) -> GgufVocabulary:
    """Return the vocabulary. If the file does not say it, prompts begin with a token only under the rule of Llama 3."""
    return GgufVocabulary.read(gguf, adds_bos=gguf.get("tokenizer.ggml.pre") == "llama-bpe")


def build(gguf: GgufFile, vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer. Raises `ConfigError` for a rule that is not known."""
    name = gguf.get("tokenizer.ggml.pre", "default")
    if name not in _RULES:
        raise ConfigError(
            f"{gguf.path}: tokenizer.ggml.pre is {name!r}; known here: {', '.join(_RULES)}. "
            "Give the model as a directory in Hugging Face layout instead"
        )
    rule = _RULES[name]
    # A merge is written as "left right". The byte-level alphabet has no space, so the first space is the border.
    parts = (merge.partition(" ") for merge in gguf.require("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in parts]
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    added = vocabulary.of_kind(CONTROL, USER_DEFINED)
    return vocabulary.finish(tokenizer, [AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
