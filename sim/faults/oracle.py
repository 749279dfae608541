"""The oracle: the right answer to a request, computed from its prompt and parameters only, without a cluster.

The fake model's KV of a token is its *tag*, a chained hash of all tokens up to it. A token is drawn from the tags of the
whole sequence, which are read through the block table. So one stale, foreign or missing block changes all later tokens.
The oracle computes the tags from the token ids alone.

The score of a token comes from the tags of all tokens before it. A constraint is a toy language: the tokens that it allows
depend on all earlier output tokens. A greedy draw depends on neither seed nor index, and a draw with penalties depends on how
often each token was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast
from zlib import crc32

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import LLAMA, llama_spec
from pdserve.core.model_spec import RopeSpec
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs, uniform
from pdserve.core.structured.constraint import Constraint
from pdserve.text.output import OutputText
from pdserve.text.tokenizer import Tokenizer, Utf8Stream

VOCAB_SIZE: Final = 64
BLOCK_SIZE: Final = 4
EOS: Final = 1
MAX_MODEL_LEN: Final = 160
NUM_ALLOWED: Final = 6  # of the ids that a constraint allows, besides the end of the sequence
COSTLY: Final = "costly"
"""A constraint whose text begins with this has places where the next mask takes too much work."""
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

    def stream(self, after: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Utf8Stream:
        """Return a decoder for the bytes of one output. Text before the output changes nothing."""
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
    """Return the tag of the token that follows a token with `tag`; None: the token is the first. The tag is the same in every
    process."""
    return hash((_CHAIN_START if tag is None else tag, token_id)) & _MASK


def tags_of(ids: Iterable[int]) -> list[int]:
    """Return the tags of a sequence of tokens."""
    tags: list[int] = []
    for token_id in ids:
        tags.append(chain(tags[-1] if tags else None, token_id))
    return tags


@dataclass(frozen=True, slots=True)
class OraclePlace:
    """The place that an output has reached in a toy language. It depends on every output token and on their order, so a
    grammar that misses a token, takes one twice, or takes one of the prompt, allows other tokens."""

    tag: int
    ended: bool = False
    costly: bool = False

    @classmethod
    def start(cls, text: str) -> OraclePlace:
        """Return the place before the first output token, in the language of a constraint."""
        return cls(chain(None, crc32(text.encode())), costly=text.startswith(COSTLY))

    @property
    def fails(self) -> bool:
        """True when the next mask would take too much work."""
        return self.costly and (self.tag >> 30) % 8 == 0

    @property
    def allowed(self) -> tuple[int, ...]:
        """The ids that may come next, in ascending order."""
        if self.ended:
            return (EOS,)
        first, stride = self.tag % VOCAB_SIZE, 2 * (self.tag >> 6) + 1
        if (self.tag >> 50) % 4 == 0 and first != EOS:
            return (first,)
        ids = {(first + i * stride) % VOCAB_SIZE for i in range(NUM_ALLOWED)} - {EOS}
        return tuple(sorted(ids | {EOS} if (self.tag >> 20) % 3 == 0 else ids))

    def after(self, token_id: int) -> OraclePlace:
        """Return the place after one more token, which must be allowed."""
        tag = chain(self.tag, token_id)
        return OraclePlace(tag, token_id == EOS or (tag >> 40) % 24 == 0, self.costly)


def seen_of(prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> tuple[tuple[int, int], ...]:
    """Return the ids that penalties change, ascending, and how often the output has each. A repetition penalty changes those of
    the prompt as well. Empty: nothing is changed."""
    if not params.edits_logits:
        return ()
    counts = Counter(output)
    ids = set(counts) | set(prompt if params.repetition_penalty != 1.0 else ())
    return tuple((token_id, counts[token_id]) for token_id in sorted(ids))


def draw(
    tags: Sequence[int],
    params: SamplingParams,
    index: int,
    banned_ids: Sequence[int],
    allowed: Sequence[int] = range(VOCAB_SIZE),
    seen: Sequence[tuple[int, int]] = (),
) -> int:
    """Draw output token `index` from the tags of all tokens before it. It is one of `allowed` and none of `banned_ids`.

    No id is banned where a constraint allows only some ids. seen: as `seen_of` returns it.
    """
    seed, index = (0, 0) if params.greedy else (params.seed, index)
    token_id = allowed[int(uniform(hash((seed, *tags, *seen)) & _MASK, index) * len(allowed))]
    while token_id in banned_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def score(tags: Sequence[int], token_id: int, count: int) -> TokenLogprobs:
    """Return the score of a token after tokens with these tags, with `count` likeliest ids. The wire has 32-bit floats,
    which hold these numbers."""
    mixed = hash((token_id, *tags)) & _MASK
    top = tuple(((mixed >> i) % VOCAB_SIZE, -float((mixed >> i) % 509)) for i in range(count))
    return TokenLogprobs(-float(mixed % 65521) / 256, top)


@dataclass(frozen=True, slots=True)
class RightAnswer:
    """The right answer to a request."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """None: the grammar fails after these tokens, and the request with it."""
    scores: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of all prompt tokens but the first, if the request asks for them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of all output tokens, if the request asks for them."""


def answer(prompt: tuple[int, ...], params: SamplingParams, constraint: Constraint | None = None) -> RightAnswer:
    """Compute the whole answer. The code is separate from the scheduler's; only `OutputText` is shared with production."""
    ids, text, reason = _output(prompt, params, None if constraint is None else OraclePlace.start(constraint.text))
    tokens = (*prompt, *ids)
    tags = tags_of(tokens)

    def scores(first: int, end: int, count: int | None) -> tuple[TokenLogprobs, ...]:
        return () if count is None else tuple(score(tags[:i], tokens[i], count) for i in range(first, end))

    of_prompt = scores(1, len(prompt), params.prompt_logprobs)
    return RightAnswer(ids, text, reason, of_prompt, scores(len(prompt), len(tokens), params.logprobs))


def _output(
    prompt: tuple[int, ...], params: SamplingParams, place: OraclePlace | None
) -> tuple[tuple[int, ...], str, FinishReason | None]:
    """Return the ids, the text and the finish reason of the output."""
    stop_ids = (*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids)
    text = OutputText.of(TOKENIZER, prompt, params)
    ids: list[int] = []
    pieces: list[str] = []
    tags = tags_of(prompt)
    while True:
        if place is not None and place.fails:
            return tuple(ids), "".join(pieces), None
        allowed = range(VOCAB_SIZE) if place is None else place.allowed
        banned = stop_ids if len(ids) < params.min_tokens else ()
        token_id = draw(tags, params, len(ids), banned, allowed, seen_of(prompt, ids, params))
        place = None if place is None else place.after(token_id)
        ids.append(token_id)
        tags.append(chain(tags[-1], token_id))
        ended = len(ids) >= params.min_tokens and token_id in stop_ids
        if ended and not params.include_stop_str_in_output:
            return tuple(ids), "".join(pieces) + text.flush(), FinishReason.STOP
        step = text.push(token_id)
        pieces.append(step.text)
        if step.stopped:
            return tuple(ids), "".join(pieces), FinishReason.STOP
        if ended or (place is not None and place.ended):
            return tuple(ids), "".join(pieces) + text.flush(), FinishReason.STOP
        if len(ids) >= params.max_tokens or len(prompt) + len(ids) >= MAX_MODEL_LEN:
            return tuple(ids), "".join(pieces) + text.flush(), FinishReason.LENGTH
