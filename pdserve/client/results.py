"""Answers: their pieces as they come, and whole ones. All are immutable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pdserve.core.sampling import FinishReason, TokenLogprobs, unpack_logprobs
from pdserve.rpc.codec import finish_from_wire
from pdserve.rpc.v1 import inference_pb2

Report = inference_pb2.RequestReport
"""The report of how a request was served: its workers, the times of its phases, and the KV that moved."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, or a piece of one: `id` and `name` are on its first piece, `arguments` is JSON text."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens [index, index + len(ids)) of one choice, and the text that became certain with them."""

    choice: int
    index: int
    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """The last delta of a choice has it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each id, if the request asks for log-probabilities."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt's tokens but the first, on the first delta, if the request asks for them."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    report: Report | None = None
    """The last delta of a choice has it; a beam search has none."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Both counts are of the choice, and its last delta has them."""
    cached_tokens: int | None = None
    """The prompt tokens that were not computed, on the last delta. None: the server does not tell."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output."""

    index: int
    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    report: Report | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    """The prompt tokens that were not computed, because their KV was cached. None: the server does not tell."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """`ids`, by the name that vLLM's users know."""
        return self.ids

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the output's tokens. None: the request asked for none."""
        return sum(one.logprob for one in self.logprobs) if self.logprobs else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A whole answer. `outputs[i]` is choice i."""

    request_id: str
    outputs: tuple[Choice, ...]
    prompt: str | None = None
    """The text of the prompt. None where the request had token ids, or a chat whose text was not asked for: see `LLM`."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The token ids of the prompt. None where only the server knows them. `LLM` asks for them; `Client.tokenize` does, too."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.outputs[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        """The output ids of the first choice."""
        return self.outputs[0].ids

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the first choice ended."""
        return self.outputs[0].finish_reason

    @property
    def report(self) -> Report | None:
        """The report of the first choice."""
        return self.outputs[0].report


def delta_of(wire: inference_pb2.GenerateResponse) -> Delta:
    """Read a message of an answer. Raises ValueError or KeyError for a message of another version that makes no sense here."""
    ended = bool(wire.finish_reason)
    return Delta(
        choice=wire.choice,
        index=wire.index,
        ids=tuple(wire.ids),
        text=wire.text,
        finish_reason=finish_from_wire(wire.finish_reason),
        logprobs=unpack_logprobs(wire.logprobs, len(wire.ids)) if wire.logprobs.chosen else (),
        prompt_logprobs=unpack_logprobs(wire.prompt_logprobs, len(wire.prompt_logprobs.chosen)),
        reasoning=wire.reasoning,
        tool_calls=tuple(ToolCall(call.index, call.id, call.name, call.arguments) for call in wire.tool_calls),
        report=wire.report if ended and wire.HasField("report") else None,
        prompt_tokens=wire.usage.prompt_tokens if ended else 0,
        output_tokens=wire.usage.output_tokens if ended else 0,
        cached_tokens=wire.usage.cached_tokens if ended and wire.usage.HasField("cached_tokens") else None,
    )


@dataclass(slots=True)
class _Open:
    """A choice of which the end has not come."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[ToolCall]] = field(default_factory=dict)
    """The pieces of each call by its index."""
    last: Delta | None = None


class Gathered:
    """Joins the deltas of one answer."""

    def __init__(self) -> None:
        self._choices: dict[int, _Open] = {}

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        choice = self._choices.setdefault(delta.choice, _Open())
        choice.ids += delta.ids
        choice.texts.append(delta.text)
        choice.logprobs += delta.logprobs
        choice.prompt_logprobs = choice.prompt_logprobs or delta.prompt_logprobs
        choice.reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            choice.calls.setdefault(call.index, []).append(call)
        if delta.finish_reason is not None:
            choice.last = delta

    def whole(self, request_id: str, asked: inference_pb2.GenerateRequest) -> RequestOutput | None:
        """Return the answer to what was asked. None: a choice, or every one, has not ended."""
        outputs = [_closed(index, one) for index, one in sorted(self._choices.items())]
        whole = tuple(output for output in outputs if output is not None)
        if not whole or len(whole) < len(outputs):
            return None
        ids = tuple(asked.tokens.ids) if asked.HasField("tokens") else None
        return RequestOutput(request_id, whole, asked.text if asked.HasField("text") else None, ids)


def _closed(index: int, choice: _Open) -> Choice | None:
    last = choice.last
    if last is None or last.finish_reason is None:
        return None
    return Choice(
        index=index,
        text="".join(choice.texts),
        ids=tuple(choice.ids),
        finish_reason=last.finish_reason,
        logprobs=tuple(choice.logprobs),
        prompt_logprobs=choice.prompt_logprobs,
        reasoning="".join(choice.reasoning),
        tool_calls=tuple(  # the first piece of a call has its id and its name
            replace(pieces[0], arguments="".join([piece.arguments for piece in pieces]))
            for _, pieces in sorted(choice.calls.items())
        ),
        report=last.report,
        prompt_tokens=last.prompt_tokens,
        output_tokens=last.output_tokens,
        cached_tokens=last.cached_tokens,
    )
