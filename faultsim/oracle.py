"""The oracle: the right answer to a request, computed from its prompt and parameters only, without a cluster.

The fake model's KV of a token is its *tag*, a chained hash of all tokens up to it. A token is drawn from the tags of the
whole sequence, which are read through the block table. So one stale, foreign or missing block changes all later tokens.
The oracle computes the tags from the token ids alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import LLAMA, llama_spec
from pdserve.core.model_spec import RopeSpec
from pdserve.core.sampling import FinishReason, SamplingParams, uniform
from pdserve.text.output import OutputText
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.utf8 import Utf8Stream

VOCAB_SIZE: Final = 64
EOS: Final = 1
MAX_MODEL_LEN: Final = 160
_CHAIN_START: Final = 0x5EED
_MASK: Final = (1 << 61) - 1

_PIECES: Final = ("a", "b ", "ab", "é", "€", "\n")  # some tokens are parts of these bytes, which the text must survive


class SimTokenizer:
    """A tokenizer for output only, since prompts come as ids. Some of its tokens are parts of characters."""

    has_chat_template = False
    chat_template = None
    special_tokens: ClassVar[dict[int, str]] = {}
    vocab_size = VOCAB_SIZE

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; the end of the sequence adds none."""
        if token_id == EOS:
            return b""
        piece = _PIECES[token_id % len(_PIECES)].encode()
        return piece[: 1 + token_id % len(piece)] if token_id % 7 == 0 else piece

    def written_bytes(self, token_id: int) -> bytes:
        """Return the same bytes, and for the end of the sequence its written form."""
        return self.token_bytes(token_id) or b"</s>"

    def stream(self) -> Utf8Stream:
        """Return a decoder for the bytes of one output."""
        return Utf8Stream()


TOKENIZER: Final = cast(Tokenizer, cast(Any, SimTokenizer()))

CARD: Final = ModelCard(
    name="sim",
    architecture="sim",
    spec=llama_spec(
        vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1, heads=1, kv_heads=[1], head_dim=1,
        max_position=MAX_MODEL_LEN, rope=RopeSpec(1.0), eps=1e-5, tied_head=True,
    ),
    tensors=LLAMA.tensors,
    eos_token_ids=(EOS,),
    fingerprint="sim",
)  # fmt: skip


def chain(tag: int | None, token_id: int) -> int:
    """Return the tag of the token that follows one with `tag`; None: it is the first. It is the same in every process."""
    return hash((_CHAIN_START if tag is None else tag, token_id)) & _MASK


def tags_of(ids: Iterable[int]) -> list[int]:
    """Return the tags of a sequence of tokens."""
    tags: list[int] = []
    for token_id in ids:
        tags.append(chain(tags[-1] if tags else None, token_id))
    return tags


def draw(tags: Sequence[int], params: SamplingParams, index: int, banned_ids: Sequence[int]) -> int:
    """Draw output token `index` from the tags of all tokens before it. It is none of `banned_ids`."""
    token_id = int(uniform(hash((params.seed, *tags)) & _MASK, index) * VOCAB_SIZE)
    while token_id in banned_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


@dataclass(frozen=True, slots=True)
class Answer:
    """The right answer to a request."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def answer(prompt: tuple[int, ...], params: SamplingParams) -> Answer:
    """Compute the whole answer. The code is separate from the scheduler's; only `OutputText` is shared with production."""
    stop_ids = (*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids)
    text = OutputText.of(TOKENIZER, params)
    ids: list[int] = []
    pieces: list[str] = []
    tags = tags_of(prompt)
    while True:
        token_id = draw(tags, params, len(ids), stop_ids if len(ids) < params.min_tokens else ())
        ids.append(token_id)
        tags.append(chain(tags[-1], token_id))
        ended = len(ids) >= params.min_tokens and token_id in stop_ids
        if ended and not params.include_stop_str_in_output:
            return Answer(tuple(ids), "".join(pieces) + text.flush(), FinishReason.STOP)
        step = text.push(token_id)
        pieces.append(step.text)
        if step.stopped:
            return Answer(tuple(ids), "".join(pieces), FinishReason.STOP)
        if ended:
            return Answer(tuple(ids), "".join(pieces) + text.flush(), FinishReason.STOP)
        if len(ids) >= params.max_tokens or len(prompt) + len(ids) >= MAX_MODEL_LEN:
            return Answer(tuple(ids), "".join(pieces) + text.flush(), FinishReason.LENGTH)
