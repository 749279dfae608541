"""Several requests at the same time over one connection. Their tokens are shown as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from pdserve.client import Answer, CallFailed, InferenceClient
from pdserve.cluster.errors import Interrupted
from pdserve.rpc.v1 import inference_pb2

LOOK_S = 0.1
REFRESHES_S = 10
SHOWN_CHARS = 400  # a panel shows at most these last characters of an answer


@dataclass(slots=True)
class PromptStream:
    """One request: its text so far, and its end. Only its own thread writes to it."""

    name: str
    prompt: str
    text: str = ""
    first_token_at: float | None = None  # time.monotonic()
    last: inference_pb2.GenerateResponse | None = None  # the message that has the finish reason
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """The reason why the request was not served; None when it was."""
        if self.error:
            return self.error
        return None if self.last else "the stream ended before the request did"


class StreamView:
    """The view of all streams: panels on a terminal, and one line for each message elsewhere."""

    def __init__(self, console: Console, streams: Sequence[PromptStream]) -> None:
        self._console = console
        self._streams = streams
        self._live = Live(self, console=console, refresh_per_second=REFRESHES_S) if console.is_terminal else None

    def __enter__(self) -> StreamView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def piece(self, stream: PromptStream, message: inference_pb2.GenerateResponse) -> None:
        """Show one message of a stream. Without a terminal each message is a line, so that a log shows tokens as they come."""
        if self._live is None and (message.text or message.finish_reason):
            self._console.print(f"{stream.name} +{message.index:<3d} {message.text!r}", markup=False, highlight=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        panels = []
        for stream in self._streams:
            style = "red" if stream.error else "green" if stream.last else "cyan"
            body = Text(stream.error or stream.text[-SHOWN_CHARS:] or "…")
            panels.append(Panel(body, title=f"{stream.name}: {stream.prompt}", title_align="left", border_style=style))
        yield Group(*panels)


def run(
    client: InferenceClient,
    requests: Mapping[str, tuple[str, inference_pb2.GenerateRequest]],
    console: Console,
    stop: threading.Event,
) -> list[PromptStream]:
    """Send all requests at the same time and wait until they have ended. Raises `Interrupted` once `stop` is set.

    requests: (prompt to show, request) by name.
    """
    streams = [PromptStream(name, shown) for name, (shown, _) in requests.items()]
    answers = [client.generate(request) for _, request in requests.values()]
    with StreamView(console, streams) as view:
        threads = [
            threading.Thread(target=_follow, args=(stream, answer, view), name=stream.name, daemon=True)
            for stream, answer in zip(streams, answers, strict=True)
        ]
        for thread in threads:
            thread.start()
        _wait(threads, answers, stop)
    return streams


def _wait(threads: Sequence[threading.Thread], answers: Sequence[Answer], stop: threading.Event) -> None:
    for thread in threads:
        while thread.is_alive() and not stop.is_set():
            thread.join(LOOK_S)
    if stop.is_set():
        for answer in answers:
            answer.cancel()
        for thread in threads:
            thread.join(1.0)
        raise Interrupted


def _follow(stream: PromptStream, answer: Answer, view: StreamView) -> None:
    try:
        for message in answer:
            if stream.first_token_at is None and message.ids:
                stream.first_token_at = time.monotonic()
            stream.text += message.text
            view.piece(stream, message)
            if message.finish_reason:
                stream.last = message
    except CallFailed as exc:
        stream.error = exc.message
