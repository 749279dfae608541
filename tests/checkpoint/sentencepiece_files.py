"""GGUF files with a SentencePiece tokenizer, and the rule of SentencePiece's BPE, written for a reader and not for speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
FIRST = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: `normal` in the order in which training made them, `defined` as the file writes them. `alike` are normal
    pieces that share a score below all others."""

    normal: Sequence[str]
    defined: Sequence[str] = ()
    prefix: bool = False
    alike: Sequence[str] = ()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[tuple[str, int]]:
        defined, normal = (
            [(piece, kind) for piece in of]
            for of, kind in ((self.defined, USER_DEFINED), ((*self.normal, *self.alike), NORMAL))
        )
        return [*FIRST, *BYTES, *defined, *normal]

    @property
    def scores(self) -> list[float]:
        first, same = len(self.tokens) - len(self.normal) - len(self.alike), len(self.tokens) - len(self.alike)
        return [float(min(0, first - index)) if index < same else -1e9 for index in range(len(self.tokens))]

    def write(self, path: Path) -> Path:
        """Write a file that has a tokenizer and nothing else."""
        writer = gguf.GGUFWriter(path, "gemma3")
        self.add_to(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([token for token, _ in self.tokens])
        writer.add_token_scores(self.scores)
        writer.add_token_types([kind for _, kind in self.tokens])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(0)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(self.prefix)
        for key, value in self.more.items():
            {bool: writer.add_bool, str: writer.add_string}[type(value)](key, value)


def ids_of(text: str, tokens: Sequence[tuple[str, int]], scores: Sequence[float], *, prefix: bool = False) -> list[int]:
    """Return the ids of a text: join the neighbours with the best score, the leftmost of equal ones, until none fit."""
    index = {token.replace(" ", "▁"): number for number, (token, _) in enumerate(tokens)}
    score = {token: scores[number] for number, (token, kind) in enumerate(tokens) if kind == NORMAL}
    defined = sorted((token.replace(" ", "▁") for token, kind in tokens if kind == USER_DEFINED), key=len, reverse=True)
    rest = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    symbols: list[tuple[str, bool]] = []  # the second one: nothing is joined with it
    while rest:
        found = next((piece for piece in defined if rest.startswith(piece)), None)
        symbols.append((found or rest[0], found is not None))
        rest = rest[len(symbols[-1][0]) :]
    while True:
        pairs = [
            (-score[left + right], place)
            for place, ((left, kept), (right, kept_too)) in enumerate(pairwise(symbols))
            if not kept and not kept_too and left + right in score
        ]
        if not pairs:
            break
        _, place = min(pairs)
        symbols[place : place + 2] = [(symbols[place][0] + symbols[place + 1][0], False)]
    ids: list[int] = []
    for piece, kept in symbols:
        known = kept or piece in score
        ids += [index[piece]] if known else [index[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids
