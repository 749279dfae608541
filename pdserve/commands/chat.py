"""`pdserve chat`: a conversation on the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.commands.requests import Messages, address_option, build, heed_any_input, request_options
from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import InferenceClient

HELP: Final = """\
/clear        begin a new conversation; the system message stays
/system TEXT  replace the system message; without TEXT there is none
/help         show this list
/exit         leave, as Ctrl-D does
Ctrl-C cancels an answer. A question that begins with a slash needs a blank before it."""
FULL: Final = ("maximum context length", "max_model_len")
"""One of these stands in the router's refusal of a conversation that the model's context cannot hold."""


@click.command(short_help="Talk with the model.")
@address_option
@request_options
@click.option("--system", default="", help="Begin the conversation with this system message.")
@one_line_errors
def chat(address: str, system: str, **fields: Any) -> int:
    """Talk with the model. /help lists the commands.

    Ctrl-C cancels the current answer. At the prompt, Ctrl-C and Ctrl-D end the conversation, and the arrow keys edit the
    line and bring back earlier ones. A terminal gets no control characters of the model; a pipe gets the text as it is.
    """
    from pdserve.client import InferenceClient
    from pdserve.commands.console import plain

    heed_any_input()
    with contextlib.suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401  input() edits lines with it
    with InferenceClient(address) as client:
        info = client.model_info()
        click.echo(plain(f"{info.model} at {address}; /help lists the commands, Ctrl-D leaves"), err=True)
        conversation = Conversation(client, system, info.max_model_len, fields)
        while (text := _ask()) is not None:
            if text.startswith("/"):
                if not conversation.obey(text):
                    break
            elif text.strip():
                conversation.turn(text)
    return 0


def _ask() -> str | None:
    """Return the line that the person types; None when they leave."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


class Conversation:
    """The questions and answers so far, and the system message before them. max_model_len: the context's length in tokens."""

    def __init__(self, client: InferenceClient, system: str, max_model_len: int, fields: dict[str, Any]) -> None:
        self._client = client
        self._system = system
        self._max_model_len = max_model_len
        self._fields = fields
        self._history: Messages = []

    def obey(self, line: str) -> bool:
        """Carry out a command, or say that there is no such one. Return False if the person leaves."""
        command, _, text = line.partition(" ")
        if command == "/exit":
            return False
        if command == "/clear":
            self._history.clear()
            click.echo("a new conversation", err=True)
        elif command == "/system":
            self._system = text.strip()
            click.echo("the system message is replaced" if self._system else "there is no system message", err=True)
        elif command == "/help":
            click.echo(HELP, err=True)
        else:
            report(f"there is no command {command:.40}; /help lists them, and a blank before the slash sends the line", FAILED)
        return True

    def turn(self, text: str) -> None:
        """Send one question and print its answer. Both join the history, even when the answer was cancelled.

        A question that failed does not join the history, since the next one would fail for the same reason.
        """
        from pdserve.client import CallFailed
        from pdserve.commands.console import say

        system = [("system", self._system)] if self._system else []
        try:
            request = build(messages=[*system, *self._history, ("user", text)], **self._fields)
        except InvalidRequest as exc:
            report(exc.message, FAILED)
            return
        answer = self._client.generate(request)
        parts: list[str] = []
        tokens = 0
        try:
            for message in answer:
                parts.append(message.text)
                say(message.reasoning, dim=True)
                say(message.text)
                tokens = message.usage.prompt_tokens + message.usage.output_tokens
        except KeyboardInterrupt:
            answer.cancel()
            click.echo(" [cancelled]", nl=False)
        except CallFailed as exc:
            click.echo()
            full = self._history and any(words in exc.message for words in FULL)
            report(exc.message + ("; /clear begins a new conversation" if full else ""), FAILED)
            return
        click.echo()
        self._history += [("user", text), ("assistant", "".join(parts))]
        if tokens >= self._max_model_len:
            click.echo(
                f"the model's context of {self._max_model_len} tokens is full; /clear begins a new conversation", err=True
            )
