"""The text of a request as a worker makes it, against the definition on the whole text: every option, tokenizer and resume."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from pdserve.checkpoint.resolve import resolve
from pdserve.core.ids import Handle
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.rpc.codec import finish_from_wire
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.host import OutputStream

SAMPLE = "The cat 👩‍👩‍👧‍👦 sat; naïve 日本語, END of it.\n\nUser: no END <|im_end|> \u2028 \x07"
KINDS = ("tiny", "default", "sentencepiece", "byte-level")


@functools.cache
def tokenizer_of_kind(kind: str) -> Tokenizer:
    """Return one of the two models' own tokenizers, or one that is trained in the form of a family's."""
    if kind in ("tiny", "default"):
        return Tokenizer.load(resolve(kind))
    special = ["<s>", "</s>", "<|im_end|>"]
    if kind == "byte-level":  # Llama 3, Qwen, Mistral's newer ones
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    else:  # Llama 2, Mistral, Gemma, Phi-3
        backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator([SAMPLE.split(" <|")[0]] * 4, trainer)
    if kind == "sentencepiece":  # bytes are no special tokens there
        text = backend.to_str()
        backend = tokenizers.Tokenizer.from_str(
            text.replace('"special":true', '"special":false').replace('"special": true', '"special": false')
        )
        backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<|im_end|>")])
    return Tokenizer(backend, None)


@dataclass
class Case:
    """A request and the tokens that its engine draws."""

    ids: list[int]
    params: SamplingParams
    ends: set[int]

    def reason(self, count: int) -> FinishReason | None:
        """Return why the engine ends the request at token number `count`."""
        if self.ids[count - 1] in self.ends and count >= self.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == len(self.ids) else None


def case_of(data: st.DataObject, tokenizer: Tokenizer) -> Case:
    """Draw real text, random ids, special tokens, and single bytes that rarely make characters."""
    tokens = st.integers(0, 260) | st.integers(0, tokenizer.vocab_size + 5)
    text = st.text(st.sampled_from(SAMPLE), max_size=12).map(tokenizer.encode)
    ids = list(itertools.chain(*data.draw(st.lists(text | st.lists(tokens, min_size=1, max_size=4), max_size=8)))) or [5]
    special = {i for i in range(tokenizer.vocab_size) if tokenizer.written_bytes(i) != tokenizer.token_bytes(i)}
    stop_ids = tuple(data.draw(st.lists(st.sampled_from(ids), max_size=2, unique=True)))
    params = SamplingParams(
        max_tokens=len(ids),
        stop=tuple(data.draw(st.lists(st.text(st.sampled_from("ENDo. \nt日"), min_size=1, max_size=3), max_size=3))),
        stop_token_ids=stop_ids,
        min_tokens=data.draw(st.integers(0, len(ids))),
        ignore_eos=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    return Case(ids, params, {*stop_ids, *(() if params.ignore_eos else special)})


def definition(tokenizer: Tokenizer, case: Case) -> tuple[str, FinishReason, int, str]:
    """Return text, finish reason, number of tokens and the stop string that was found, from the text of all tokens at once."""
    params = case.params
    written = tokenizer.token_bytes if params.skip_special_tokens else tokenizer.written_bytes

    def text_of(count: int, *, whole: bool) -> str:
        stream = tokenizer.stream()
        text = stream.push(b"".join(map(written, case.ids[:count])))
        return text + stream.flush() if whole else text

    for count in range(1, len(case.ids) + 1):
        reason = case.reason(count)
        if reason is FinishReason.STOP and not params.include_stop_str_in_output:
            return text_of(count - 1, whole=True), reason, count, ""
        before, now = text_of(count - 1, whole=False), text_of(count, whole=False)
        for end in range(len(before) + 1, len(now) + 1):
            found = [stop for stop in params.stop if now[:end].endswith(stop)]
            if found and count >= params.min_tokens:
                kept = end if params.include_stop_str_in_output else end - max(map(len, found))
                return now[:kept], FinishReason.STOP, count, max(found, key=len)
        if reason is not None:
            return text_of(count, whole=True), reason, count, ""
    raise AssertionError("the last token ends the request")


def streamed(tokenizer: Tokenizer, case: Case, resumed: int = 0) -> tuple[list[str], FinishReason, int, str]:
    """Return the text of each row of a worker that goes on after `resumed` tokens, the finish reason, the last index and the
    stop string that was found."""
    stream = OutputStream(Handle(1), tokenizer, (), case.params, case.ids[:resumed], eos_token_ids=tuple(case.ends))
    texts = []
    for index in range(resumed, len(case.ids)):
        row = stream.push(index, case.ids[index], case.reason(index + 1))
        assert (row.index, list(row.ids)) == (index, [case.ids[index]])
        texts.append(row.text.decode())
        if (reason := finish_from_wire(row.finish_reason)) is not None:
            return texts, reason, index + 1, case.params.stop[row.stop_string - 1] if row.stop_string else ""
        assert not row.stop_string
    raise AssertionError("the last token ends the request")


@pytest.mark.quick("tiny", "sentencepiece", "byte-level")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_text_of_a_worker_is_the_definitions(kind, data):
    tokenizer = tokenizer_of_kind(kind)
    case = case_of(data, tokenizer)
    texts, *end = streamed(tokenizer, case)
    assert ("".join(texts), *end) == definition(tokenizer, case)


@pytest.mark.quick("tiny", "sentencepiece", "byte-level")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_worker_that_takes_over_anywhere_goes_on_with_the_same_text(kind, data):
    tokenizer = tokenizer_of_kind(kind)
    case = case_of(data, tokenizer)
    texts, *end = streamed(tokenizer, case)
    for resumed in range(len(texts)):
        assert streamed(tokenizer, case, resumed) == (texts[resumed:], *end)
