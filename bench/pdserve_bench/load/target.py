"""The server that gets the load, as the generator sees it: calls, answers, and why calls fail."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec

from pdserve_bench.row import Arrival, Served
from pdserve_bench.workload.request import Ids

# The reasons of failures that the generator itself names. A reason that a server gave stands in the row as it came.


PREDECESSOR_FAILED: Final = "predecessor_failed"
"""A request that this one continues has failed, so this one was never sent."""
PREDECESSOR_UNKNOWN: Final = "predecessor_unknown"
"""The workload names a request that has not come before this one."""
ANSWER_GONE: Final = "answer_gone"
"""The prompt holds an earlier answer that is no longer kept, or that came as text where the prompt has token ids."""
MIXED_PROMPT: Final = "mixed_prompt"
"""The prompt mixes text and token ids."""
TIMEOUT: Final = "timeout"
"""The request took longer than `request_timeout_s`."""
CONNECTION_REFUSED: Final = "connection_refused"
"""Nothing listens at the address, or its name is unknown."""
CONNECT_FAILED: Final = "connect_failed"
"""No connection could be made, for another reason: no sockets are left, or no certificate fits."""
REDIRECTED: Final = "redirected"
"""The server sent the request elsewhere. The load goes only to the server that was named."""
BROKEN_STREAM: Final = "broken_stream"
"""The connection or the stream ended before the answer did."""
BAD_HTTP: Final = "bad_http"
"""The answer is not HTTP."""
BAD_JSON: Final = "bad_json"
"""An event of the stream is not JSON of the form that OpenAI documents."""
BAD_UTF8: Final = "bad_utf8"
"""The prompt holds characters that UTF-8 cannot encode."""
CHAT_NEEDS_TEXT: Final = "chat_needs_text"
"""The prompt has token ids, which the chat endpoint does not take. `--backend openai` does."""
LINE_TOO_LONG: Final = "line_too_long"
"""One event of the stream is longer than the generator keeps."""
HEAD_TOO_LONG: Final = "head_too_long"
"""The head of the answer is longer than the generator keeps."""
TOO_MANY_TOKENS: Final = "too_many_tokens"
"""The server sent more messages with tokens than the request allows tokens."""
NO_TOKENS: Final = "no_tokens"
"""The answer ended well, but without a token."""
TARGET_BUG: Final = "target_bug"
"""The generator's own code failed. Its log has the traceback."""

NEVER_SENT: Final = frozenset({PREDECESSOR_FAILED, PREDECESSOR_UNKNOWN, ANSWER_GONE, MIXED_PROMPT})
"""Rows with these errors have no time of sending, so no lag."""

MEANINGS: Final = {
    PREDECESSOR_FAILED: "a request that it continues has failed, so it was never sent",
    ANSWER_GONE: "the answer that it continues came as text, or is no longer kept; --tokenizer makes token ids of text",
    MIXED_PROMPT: "its prompt mixes text and token ids",
    TIMEOUT: "it took longer than --request-timeout-s",
    REDIRECTED: "the server sends it elsewhere; name that address",
    BROKEN_STREAM: "the connection or the stream ended before the answer did",
    BAD_HTTP: "the answer is not HTTP; is this the HTTP port?",
    BAD_JSON: "an event of the stream is not JSON of OpenAI's form",
    BAD_UTF8: "the prompt or the name of the model is not UTF-8 text",
    CHAT_NEEDS_TEXT: "the prompt has token ids; take --backend openai",
    TOO_MANY_TOKENS: "the server sent more tokens than max_tokens",
    NO_TOKENS: "the answer ended well, but without a token",
    TARGET_BUG: "the generator failed; its log has the traceback",
}
"""A line for those reasons to which no server adds a message of its own."""


# The fields that all requests of a run share. Pure.


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields that all requests of a run share."""

    model: str = ""
    """The name of the model. Empty: the gRPC server takes any; an HTTP server is asked for it."""
    ignore_eos: bool = True
    """The answer has exactly `max_tokens` tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token always, as other load generators do."""
    cache_salt: str = ""
    """KV of equal prompts is shared only with requests of the same salt. Empty: none is sent."""
    placement: str = ""
    """"auto", "disaggregated" or "colocated". Empty: the cluster's own."""


_TIMELINE: Final = msgspec.json.Decoder(Served)


@dataclass(frozen=True, slots=True)
class LoadCall:
    """One request as it is sent: every part of its prompt is known."""

    number: int
    prompt: str | Ids
    max_tokens: int
    slo_class: str = ""
    session: str = ""


@dataclass(slots=True)
class LoadAnswer:
    """The answer to one call. The target fills it while it arrives; the generator reads it when the call has ended.

    All times are those of the generator's clock, not of the run.
    """

    sent_s: float = 0.0
    """The time at which the target got the call. If it has to connect first, the time of this counts in TTFT."""
    ended_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    """The messages with tokens, in order."""
    prompt_tokens: int | None = None
    """The tokens of the prompt, as the server counted them. None: it did not say."""
    output_tokens: int | None = None
    """The tokens of the answer, as the server counted them. None: it did not say, and the arrivals count."""
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The tokens, where the server says ids. A later prompt may hold them."""
    error: str = ""
    message: str = ""
    """What the server or the system said of the failure. It may hold anything, in any length."""
    served: Served = field(default_factory=Served)


class Target(Protocol):
    """A server. Its implementations are `GrpcTarget` and `HttpTarget`."""

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        """Send the call and fill `answer` until it has ended. A failure is written to `answer.error`; nothing is raised.

        A cancellation ends the call on the server as well.
        """

    async def close(self) -> None:
        """Close all connections. It may be called more than once."""


def served_of_timeline(line: str | bytes) -> Served:
    """Return what a row keeps of a timeline, which answers carry in a header. A line of another form says nothing."""
    try:
        return replace(_TIMELINE.decode(line), cached_prompt_tokens=None)  # the usage tells it
    except msgspec.DecodeError:
        return Served()
