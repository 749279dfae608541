"""`pdserve generate`: stream one request's text to standard output."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import address_option, build, heed_any_input, request_options
from pdserve.commands.settings import UINT32

if TYPE_CHECKING:
    from pdserve.client import Answer
    from pdserve.rpc.v1 import inference_pb2


@click.command(short_help="Generate text from a prompt, or from standard input.")
@click.argument("prompt", required=False)
@address_option
@request_options
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message through the model's chat template.")
@click.option("--system", help="With --chat: begin with this system message.")
@click.option("--request-id", default="", help="Your own name of the request in the router's log; need not be unique.")
@click.option("--logprobs", type=UINT32, help="With --json: add log-probabilities, also of the N likeliest tokens (up to 20).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of text.")
@click.option("--stats", is_flag=True, help="Print a summary on standard error.")
@one_line_errors
def generate(
    prompt: str | None, address: str, chat: bool, system: str | None, as_json: bool, stats: bool, **fields: Any
) -> int:
    """Generate text from PROMPT, or from standard input when PROMPT is not given.

    A terminal gets no control characters of the model; a pipe or a file gets the text as it is.
    """
    from pdserve.client import InferenceClient

    if fields["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: text has no place for them")
    heed_any_input()
    text = _read() if prompt is None else prompt
    if chat:
        request = build(messages=[*([("system", system)] if system else []), ("user", text)], **fields)
    else:
        request = build(text=text, **fields)
    with InferenceClient(address) as client:
        answer = client.generate(request)
        try:
            last = _stream(answer, as_json)
        except KeyboardInterrupt:
            answer.cancel()
            return INTERRUPTED
    if stats and last is not None:
        click.echo(summary(last), err=True)
    return 0 if last is not None else report("the stream ended before the request did", 1)


def _read() -> str:
    """Return what stands on standard input. A person is told what is waited for, and their last end of line is left out."""
    if not sys.stdin.isatty():
        return sys.stdin.read()
    click.echo("type the prompt; Ctrl-D on a line of its own ends it", err=True)
    return sys.stdin.read().removesuffix("\n")


def _stream(answer: Answer, as_json: bool) -> inference_pb2.GenerateResponse | None:
    """Write the answer as it comes. Return the message that has the finish reason; None when no message had one."""
    from pdserve.commands.console import say

    last = None
    for message in answer:
        say(f"{to_json(message)}\n" if as_json else message.text)
        if message.finish_reason:
            last = message
    if not as_json:
        click.echo()
    return last


def to_json(message: inference_pb2.GenerateResponse) -> str:
    """Write a message as one line of JSON, with the field names of the proto. It escapes what would command a terminal."""
    from google.protobuf.json_format import MessageToDict

    from pdserve.commands.console import plain

    text = json.dumps(MessageToDict(message, preserving_proto_field_name=True), ensure_ascii=False)
    return text if plain(text) == text else "".join(char if plain(char) else json.dumps(char)[1:-1] for char in text)


def summary(message: inference_pb2.GenerateResponse) -> str:
    """Describe in one line how the request was served: tokens, workers, times, KV bytes."""
    from pdserve.commands.tables import acceptance, millis, size

    report, usage = message.report, message.usage
    workers = f"{report.prefill_worker} -> {report.decode_worker}" if report.prefill_worker else report.decode_worker
    drafts = f"; {acceptance(report.speculation)}" if report.speculation.num_drafts else ""
    return (
        f"{usage.prompt_tokens} + {usage.output_tokens} tokens on {workers} ({report.placement_reason}); "
        f"TTFT {millis(report.ttft_s)}, TPOT {millis(report.tpot_s)}; "
        f"KV moved {size(report.kv_bytes)}, exposed transfer {millis(report.exposed_transfer_s)}{drafts}"
    )
