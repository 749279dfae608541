"""Chunks cut out of a template once are what encoding each anew would give."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.sampling import FinishReason
from router.api.request import GenerateInput
from router.openai.chunks import ChunkFormat, Envelope
from router.openai.request import Call

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FINISH = st.sampled_from([None, *FinishReason])


def payload(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    return json.loads(event[6:])


@given(
    chat=st.booleans(), include=st.booleans(), index=st.integers(0, 99), text=TEXT, finish=FINISH, model=TEXT,
    stop=st.none() | st.integers() | TEXT,
)  # fmt: skip
def test_chunk(
    chat: bool, include: bool, index: int, text: str, finish: FinishReason | None, model: str, stop: int | str | None
) -> None:
    call = Call(chat, "r", (GenerateInput("p"),), True, include, False)
    envelope = Envelope(call, model)
    chunk = payload(ChunkFormat(envelope, call, index).chunk(text, finish, stop_reason=stop))
    choice = {"index": index, **({"delta": {"content": text}} if chat else {"text": text}), "logprobs": None,
              "finish_reason": finish.value if finish else None, **({"stop_reason": stop} if finish else {})}  # fmt: skip
    expected = envelope.wrap("chat.completion.chunk" if chat else "text_completion", choices=[choice])
    assert chunk == expected | ({"usage": None} if include else {})
    assert chunk["id"] == ("chatcmpl-r" if chat else "cmpl-r")


@given(chat=st.booleans(), text=TEXT, finish=FINISH)
def test_chunk_with_usage(chat: bool, text: str, finish: FinishReason | None) -> None:
    call = Call(chat, "r", (GenerateInput("p"),), True, True, True)
    format_ = ChunkFormat(Envelope(call, "m"), call, 0)
    totals = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    chunk = format_.chunk(text, finish)
    assert payload(format_.with_usage(chunk, totals)) == payload(chunk) | {"usage": totals}


@given(chat=st.booleans(), text=TEXT | st.just('"logprobs":null'), finish=FINISH)
def test_chunk_with_logprobs(chat: bool, text: str, finish: FinishReason | None) -> None:
    call = Call(chat, "r", (GenerateInput("p"),), True, False, False)
    format_ = ChunkFormat(Envelope(call, '"logprobs":null'), call, 0)
    told = {"content": [{"token": '"logprobs":null', "logprob": -0.5}]}
    expected = payload(format_.chunk(text, finish))
    expected["choices"][0]["logprobs"] = told
    assert payload(format_.chunk(text, finish, told)) == expected
