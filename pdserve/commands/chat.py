"""`pdserve chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import one_line_errors, report
from pdserve.commands.requests import Messages, address_option, build, request_options

if TYPE_CHECKING:
    from pdserve.client import InferenceClient


@click.command()
@address_option
@request_options
@click.option("--system", help="The system's message.")
@one_line_errors
def chat(address: str, system: str | None, **fields: Any) -> int:
    """Talk with the model. Ctrl-C cancels the current answer; at the prompt it leaves, as Ctrl-D does."""
    from pdserve.client import InferenceClient

    history: Messages = [("system", system)] if system else []
    with InferenceClient(address) as client:
        info = client.model_info()
        click.echo(f"{info.model} at {address}; Ctrl-D leaves", err=True)
        while (text := _ask()) is not None:
            if text.strip():
                _turn(client, history, text, fields)
    return 0


def _ask() -> str | None:
    """What the person says; None when they leave."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


def _turn(client: InferenceClient, history: Messages, text: str, fields: dict[str, Any]) -> None:
    """One question and its answer, which joins the history even when it was cut short.

    A question that could not be answered does not join it: the next one would fail for the same reason.
    """
    from pdserve.client import CallFailed

    answer = client.generate(build(messages=[*history, ("user", text)], **fields))
    parts: list[str] = []
    try:
        for message in answer:
            parts.append(message.text)
            click.echo(message.text, nl=False)
    except KeyboardInterrupt:
        answer.cancel()
        click.echo(" [cancelled]", nl=False)
    except CallFailed as exc:
        click.echo()
        report(exc.message, 1)
        return
    click.echo()
    history += [("user", text), ("assistant", "".join(parts))]
