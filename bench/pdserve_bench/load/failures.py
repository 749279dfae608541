"""The reasons of failures that the generator itself names. A reason that a server gave stands in the row as it came."""

from __future__ import annotations

from typing import Final

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
