"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json.

GGUF stores the vocabulary and the merges. Of the rule that splits text into words before merging it stores only the *name*,
in `tokenizer.ggml.pre`. The rules here are those of the models' own tokenizer.json. The right rule matters: SmolLM isolates
digits before it looks at white space, so that in "\\n\\n1" the two line ends are one token. With GPT-2's rule they would be
two tokens, which the model has hardly seen there. (transformers 5.23, when it reads a GGUF, knows most of the names but not
SmolLM's, and takes GPT-2's rule.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pdserve.checkpoint.gguf_file import GgufFile
from pdserve.core.errors import ConfigError

_CONTROL: Final = 3  # a value of tokenizer.ggml.token_type: a special token, which is never part of the text
_USER_DEFINED: Final = 4  # another value: a token that was added to the vocabulary but is ordinary text

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


def write_tokenizer(gguf: GgufFile, directory: Path) -> None:
    """Write both files into `directory`.

    Raises `ConfigError` for a tokenizer that is not byte-level BPE, or whose rule is not known.
    """
    tokenizer = _build(gguf)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_config(gguf), indent=2, ensure_ascii=False))


def _build(gguf: GgufFile) -> Tokenizer:
    kind = gguf.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{gguf.path}: its tokenizer is {kind!r}; from a GGUF only byte-level BPE ('gpt2') is read. "
            "Give the model as a directory in Hugging Face layout instead"
        )
    name = gguf.get("tokenizer.ggml.pre", "default")
    if name not in _RULES:
        raise ConfigError(
            f"{gguf.path}: tokenizer.ggml.pre is {name!r}; known here: {', '.join(_RULES)}. "
            "Give the model as a directory in Hugging Face layout instead"
        )
    tokens: list[str] = gguf.require("tokenizer.ggml.tokens")
    merges: list[str] = gguf.require("tokenizer.ggml.merges")
    try:
        return _assemble(_RULES[name], tokens, [_pair(m) for m in merges], _added(gguf, tokens), _bos(gguf, tokens))
    except Exception as exc:  # the library raises Exception itself
        raise ConfigError(f"{gguf.path}: its tokenizer does not fit together: {exc}") from exc


def _assemble(
    rule: _Rule, tokens: list[str], merges: list[tuple[str, str]], added: list[AddedToken], bos: tuple[str, int] | None
) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge, written as "left right". The byte-level alphabet has no space, so the first space is the border."""
    left, _, right = merge.partition(" ")
    return left, right


def _added(gguf: GgufFile, tokens: list[str]) -> list[AddedToken]:
    kinds: list[int] = gguf.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _bos(gguf: GgufFile, tokens: list[str]) -> tuple[str, int] | None:
    """Return the token, as (text, id), with which every prompt begins; None: the model wants none.

    If the file lacks the setting, only models with the rule of Llama 3 want one.
    """
    wanted = gguf.get("tokenizer.ggml.add_bos_token", gguf.get("tokenizer.ggml.pre") == "llama-bpe")
    bos_id = gguf.get("tokenizer.ggml.bos_token_id")
    return (tokens[bos_id], bos_id) if wanted and bos_id is not None else None


_SPECIAL_NAMES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _config(gguf: GgufFile) -> dict[str, Any]:
    tokens: list[str] = gguf.require("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL_NAMES.items():
        index = gguf.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[name] = tokens[index]
    config["add_bos_token"] = _bos(gguf, tokens) is not None
    config["model_max_length"] = gguf.get("llama.context_length")
    template = gguf.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
