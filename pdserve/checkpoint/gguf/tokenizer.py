"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from pdserve.checkpoint.gguf import byte_level, sentencepiece
from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.vocabulary import GgufVocabulary
from pdserve.core.errors import ConfigError


class _TokenKind(NamedTuple):
    """One kind of tokenizer."""

    read_vocabulary: Callable[[GgufFile], GgufVocabulary]
    build: Callable[[GgufFile, GgufVocabulary], Tokenizer]


_KINDS: Final = {
    "gpt2": _TokenKind(byte_level.read_vocabulary, byte_level.build),
    "llama": _TokenKind(sentencepiece.read_vocabulary, sentencepiece.build),
}
"""The kinds by the names that GGUF files give them."""
_SPECIAL_NAMES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(gguf: GgufFile, directory: Path, max_length: int) -> None:
    """Write both files into `directory`. max_length: the positions of the model.

    Raises `ConfigError` for a tokenizer whose kind or rule is not known.
    """
    name = gguf.require("tokenizer.ggml.model")
    if name not in _KINDS:
        raise ConfigError(
            f"{gguf.path}: its tokenizer is {name!r}; from a GGUF only byte-level BPE ('gpt2') and SentencePiece ('llama') are "
            "read. Give the model as a directory in Hugging Face layout instead"
        )
    kind = _KINDS[name]
    vocabulary = kind.read_vocabulary(gguf)
    try:
        tokenizer = kind.build(gguf, vocabulary)
    except ConfigError:
        raise
    except Exception as exc:  # the library raises Exception itself
        raise ConfigError(f"{gguf.path}: its tokenizer does not fit together: {exc}") from exc
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _config(gguf, vocabulary, max_length)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def _config(gguf: GgufFile, vocabulary: GgufVocabulary, max_length: int) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL_NAMES.items():
        index = gguf.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[name] = vocabulary.tokens[index]
    config["add_bos_token"] = vocabulary.bos is not None
    config["model_max_length"] = max_length
    template = gguf.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
