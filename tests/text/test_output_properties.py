"""The text, ids and finish reason of whole outputs, against a reference that looks at the whole text. Outputs go through the
worker's stream and the router's joining of deltas. Every mutant of the code is caught."""

from __future__ import annotations

import asyncio
import codecs
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream

from pdserve.core.ids import Handle
from pdserve.core.sampling import FINISH_BY_NUMBER, FinishReason, SamplingParams
from pdserve.text.output import OutputText, StopScanner
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.host import OutputStream
from router.api.answer import Delta
from router.service.buffered_generation import BufferedGeneration

KINDS = ("tiny", "default", "llama 2", "gemma")
SAMPLE = "Ab ab. 世界 👩‍👩‍👧 é\u2028\n\x00"
MUTANT_SEEDS = 400


def byte_fallback(*, strip: bool) -> Tokenizer:
    """A tokenizer of the sentencepiece kind: special tokens, all bytes, and a few pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "ab", "世", "é", "▁▁"]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in pieces[:3]])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return Tokenizer(backend, None)


@pytest.fixture(scope="module")
def kinds(tokenizer_of: dict[str, Tokenizer]) -> dict[str, Tokenizer]:
    return {**tokenizer_of, "llama 2": byte_fallback(strip=True), "gemma": byte_fallback(strip=False)}


@cache
def special_ids(tokenizer: Tokenizer) -> list[int]:
    return [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i) and tokenizer.written_bytes(i)]


class Story:
    """One random request and the ids that its engine draws."""

    def __init__(self, rng: random.Random, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        special = special_ids(tokenizer)
        clean = tokenizer.encode("".join(rng.choices(SAMPLE, k=rng.randrange(12))), add_special_tokens=False)
        drawn = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randrange(6))]
        text = tokenizer.encode(" a b", add_special_tokens=False)
        self.prompt = rng.choice(([], special[:2], [*special[:1], *text], text[-1:]))
        self.ids = [*clean, *drawn, *rng.choices(special, k=rng.randrange(3))] or [0]
        if rng.random() < 0.5:
            rng.shuffle(self.ids)
        skip = rng.random() < 0.5
        whole = tokenizer.decode(self.ids, skip_special_tokens=skip) or "a"
        starts = [rng.randrange(len(whole)) for _ in range(rng.randrange(4))]
        stop = tuple({whole[at : at + rng.randint(1, 5)] for at in starts} | set(rng.choices(("ab", "a\ufffd"), k=1)))
        self.end = rng.choice(("length", "grammar", "stop id", "eos", "ignored eos"))
        last = self.ids[-1]
        self.params = SamplingParams(
            max_tokens=len(self.ids) + 1,
            min_tokens=rng.choice((0, rng.randint(0, len(self.ids)))),
            stop=stop if rng.random() < 0.8 else (),
            stop_token_ids=(last,) if self.end == "stop id" else (),
            ignore_eos=self.end == "ignored eos",
            include_stop_str_in_output=rng.random() < 0.5,
            skip_special_tokens=skip,
        )
        self.eos = (last,) if self.end in ("eos", "ignored eos") else (1 << 30,)
        self.engine_reason = FinishReason.LENGTH if self.end in ("length", "ignored eos") else FinishReason.STOP

    def bytes_of(self, token_id: int) -> bytes:
        special = token_id in special_ids(self.tokenizer)
        return b"" if special and self.params.skip_special_tokens else self.tokenizer.written_bytes(token_id)

    def right(self) -> tuple[int, str, FinishReason]:
        """The number of tokens, the text and the reason, by the definition alone."""
        params = self.params
        withheld = self.end in ("stop id", "eos") and not params.include_stop_str_in_output
        parts = [self.bytes_of(i) for i in self.ids]
        if withheld:
            parts[-1] = b""
        lengths = [len(self.text(parts[:count], final=False)) for count in range(len(parts) + 1)]
        whole = self.text(parts, final=True)
        for count in range(max(1, params.min_tokens), len(parts) + 1):
            last = len(whole) if count == len(parts) else lengths[count]
            for end in range(lengths[count - 1] + 1, last + 1):
                ending = [stop for stop in params.stop if whole[:end].endswith(stop)]
                if ending:
                    cut = end if params.include_stop_str_in_output else end - max(map(len, ending))
                    return count, whole[:cut], FinishReason.STOP
        return len(parts), whole, self.engine_reason

    def text(self, parts: list[bytes], *, final: bool) -> str:
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(parts), final)
        begins = not any(map(self.bytes_of, self.prompt))
        return text.removeprefix(" ") if self.tokenizer._strip_leading_space and begins else text

    def deltas(self, earlier: int = 0) -> list[Delta]:
        """What a worker gives out that goes on after the first `earlier` tokens."""
        ids = self.ids
        stream = OutputStream(Handle(1), self.tokenizer, self.prompt, self.params, ids[:earlier], eos_token_ids=self.eos)
        made = []
        for index in range(earlier, len(ids)):
            row = stream.push(index, ids[index], self.engine_reason if index + 1 == len(ids) else None)
            made.append(Delta(row.index, tuple(row.ids), row.text.decode(), FINISH_BY_NUMBER[row.finish_reason]))
            if made[-1].finish_reason is not None:
                break
        return made


def check(story: Story, rng: random.Random) -> None:
    """Assert all that an output promises."""
    deltas = story.deltas()
    count, text, reason = story.right()
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish_reason for delta in deltas] == [None] * (count - 1) + [reason]
    given_out = 0
    for delta in deltas[:-1]:
        given_out += len(delta.text)
        assert given_out <= len(text)
    cut = rng.randrange(count)
    assert story.deltas(cut) == deltas[cut:]
    joined = asyncio.run(taken(deltas, rng))
    assert "".join(delta.text for delta in joined) == text
    assert [token_id for delta in joined for token_id in delta.ids] == story.ids[:count]
    place = 0
    for delta in joined:
        assert delta.index == place
        place += len(delta.ids)
        assert delta.text == "".join(one.text for one in deltas[delta.index : place])
    assert joined[-1].finish_reason is reason


async def taken(deltas: list[Delta], rng: random.Random) -> list[Delta]:
    """What a client takes that comes at random moments."""
    generation = BufferedGeneration("r", (1,), lambda _: None)
    got: list[Delta] = []
    waiting = list(deltas)
    while len(got) == 0 or got[-1].finish_reason is None:
        for _ in range(min(len(waiting), rng.randint(1, 5))):
            generation.push(waiting.pop(0))
        got.append(await anext(generation))
    generation.close()
    return got


@pytest.mark.parametrize("kind", KINDS)
def test_text_ids_and_reason_are_those_of_the_whole_output(kinds: dict[str, Tokenizer], kind: str) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        check(Story(rng, kinds[kind]), rng)


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_of_a_valid_text_has_a_replacement_character(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    for seed in range(100):
        rng = random.Random(seed)
        text = "".join(rng.choices("a 世é👧🎉", k=rng.randint(1, 20)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        output = OutputText(tokenizer)
        for token_id in ids:
            assert "\ufffd" not in output.push(token_id).text


@pytest.mark.parametrize("prompt", [[], [1], [1, 263, 260], [259], [260]])
def test_the_blank_behind_a_prompt_stays_as_in_the_librarys_own_stream(kinds: dict[str, Tokenizer], prompt: list[int]) -> None:
    """Without it, "The capital of France is" and " Paris" are glued together."""
    tokenizer = kinds["llama 2"]
    for first in (259, 260, 265):  # a blank, a blank with a letter, two blanks
        own = DecodeStream(ids=prompt, skip_special_tokens=True)
        ids = [first, 260, 261]
        output = OutputText(tokenizer, prompt)
        told = "".join(output.push(index).text for index in ids) + output.flush()
        assert told == "".join(own.step(tokenizer._backend, index) or "" for index in ids)
        assert tokenizer.decode(ids, after=prompt) == told


def mutant_flushes_twice(monkeypatch: Any) -> None:
    monkeypatch.setattr(StopScanner, "flush", lambda self: self._held * 2)


def mutant_holds_nothing_back(monkeypatch: Any) -> None:
    monkeypatch.setattr(StopScanner, "_certain", lambda self, text: len(text))


def mutant_holds_too_much(monkeypatch: Any) -> None:
    monkeypatch.setattr(StopScanner, "flush", lambda self: "")


def mutant_honours_stops_before_min_tokens(monkeypatch: Any) -> None:
    honest = StopScanner.push
    monkeypatch.setattr(StopScanner, "push", lambda self, piece, honour=True: honest(self, piece))


def mutant_gives_out_stop_tokens(monkeypatch: Any) -> None:
    monkeypatch.setattr(OutputText, "push_stop", lambda self, token_id: self.push(token_id).text + self.flush())


def mutant_withholds_stop_tokens(monkeypatch: Any) -> None:
    monkeypatch.setattr(OutputText, "push_stop", lambda self, token_id: self.flush())


def mutant_decodes_each_token_alone(monkeypatch: Any) -> None:
    honest = OutputText.push

    def push(self: OutputText, token_id: int) -> Any:
        step = honest(self, token_id)
        return step._replace(text=step.text + self._characters.flush())

    monkeypatch.setattr(OutputText, "push", push)


def mutant_forgets_a_match_in_the_last_flush(monkeypatch: Any) -> None:
    monkeypatch.setattr(OutputText, "stopped", property(lambda self: False))


def mutant_resumes_without_the_earlier_text(monkeypatch: Any) -> None:
    def skip(self: OutputStream, token_id: int) -> None:
        self._next_index += 1

    monkeypatch.setattr(OutputStream, "skip", skip)


def mutant_always_skips_special_tokens(monkeypatch: Any) -> None:
    monkeypatch.setattr(Tokenizer, "written_bytes", Tokenizer.token_bytes)


def mutant_joins_ids_of_one_delta_alone(monkeypatch: Any) -> None:
    def joined(self: BufferedGeneration) -> Delta:
        parts = [self._buffer.popleft() for _ in range(len(self._buffer))]
        return Delta(parts[0].index, parts[-1].ids, "".join(part.text for part in parts), parts[-1].finish_reason)

    monkeypatch.setattr(BufferedGeneration, "_joined", joined)


def mutant_takes_each_output_for_the_beginning_of_a_text(monkeypatch: Any) -> None:
    honest = Tokenizer.stream
    monkeypatch.setattr(Tokenizer, "stream", lambda self, after=(), **options: honest(self, **options))


MUTANTS: tuple[Callable[[Any], None], ...] = tuple(one for name, one in globals().items() if name.startswith("mutant_"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.__name__)
def test_every_mutant_of_the_output_is_caught(kinds: dict[str, Tokenizer], mutant: Any, monkeypatch: Any) -> None:
    stories = []
    for seed in range(MUTANT_SEEDS):
        rng = random.Random(seed)
        stories.append((story := Story(rng, kinds[KINDS[seed % len(KINDS)]]), rng, story.right()))
    mutant(monkeypatch)
    caught = 0
    for story, rng, right in stories:
        monkeypatch.setattr(story, "right", lambda right=right: right)
        try:
            check(story, rng)
        except AssertionError:
            caught += 1
            break
    assert caught
