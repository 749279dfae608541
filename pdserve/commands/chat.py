"""`pdserve chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.commands.requests import Messages, address_option, build, heed_any_input, request_options
from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import InferenceClient


@click.command()
@address_option
@request_options
@click.option("--system", help="Begin the conversation with this system message.")
@one_line_errors
def chat(address: str, system: str | None, **fields: Any) -> int:
    """Talk with the model. Ctrl-C cancels the current answer. At the prompt, Ctrl-C and Ctrl-D end the conversation."""
    from pdserve.client import InferenceClient

    heed_any_input()
    history: Messages = [("system", system)] if system else []
    with InferenceClient(address) as client:
        info = client.model_info()
        click.echo(f"{info.model} at {address}; Ctrl-D leaves", err=True)
        while (text := _ask()) is not None:
            if text.strip():
                _turn(client, history, text, fields)
    return 0


def _ask() -> str | None:
    """Return the line that the person types; None when they leave."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


def _turn(client: InferenceClient, history: Messages, text: str, fields: dict[str, Any]) -> None:
    """Send one question and print its answer. Both join the history, even when the answer was cancelled.

    A question that failed does not join the history, since the next one would fail for the same reason.
    """
    from pdserve.client import CallFailed

    try:
        request = build(messages=[*history, ("user", text)], **fields)
    except InvalidRequest as exc:
        report(exc.message, FAILED)
        return
    answer = client.generate(request)
    parts: list[str] = []
    try:
        for message in answer:
            parts.append(message.text)
            click.secho(message.reasoning, dim=True, nl=False)
            click.echo(message.text, nl=False)
    except KeyboardInterrupt:
        answer.cancel()
        click.echo(" [cancelled]", nl=False)
    except CallFailed as exc:
        click.echo()
        report(exc.message, FAILED)
        return
    click.echo()
    history += [("user", text), ("assistant", "".join(parts))]
