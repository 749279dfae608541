"""`pdserve explain`: tell what happened to a request and why, as the router and each worker saw it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from pdserve.commands.failures import one_line_errors
from pdserve.commands.requests import admin_options

if TYPE_CHECKING:
    from pdserve.rpc.v1 import story_pb2


class Told(NamedTuple):
    """One entry of a story. `at_s` is relative to the request's arrival, and `who` is the router or a worker."""

    at_s: float
    who: str
    kind: str
    fields: tuple[tuple[str, object], ...]


@click.command(short_help="Tell the story of a request: what happened, and why.")
@click.argument("request_id")
@admin_options
@click.option("--json", "as_json", is_flag=True, help="Print the answer of the router as one JSON object.")
@one_line_errors
def explain(request_id: str, address: str, cluster_token: str, as_json: bool) -> int:
    """Tell the story of REQUEST_ID: the router's id of a request, or the client's own.

    Times are relative to the arrival of the request. The stories of failed requests are kept longest.
    """
    from pdserve.client import AdminClient

    with AdminClient(address, cluster_token) as client:
        answer = client.explain(request_id)
    if as_json:
        from google.protobuf.json_format import MessageToDict

        fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(fields))
    else:
        for line in _lines(answer):
            click.echo(line)
    return 0


def _lines(answer: story_pb2.ExplainRequestResponse) -> Iterator[str]:
    named = f" ({answer.correlation_id!r})" if answer.correlation_id else ""
    yield f"request {answer.request_id}{named}: {answer.outcome or 'running'}"
    told = list(_told("router", answer.entries))
    for part in answer.workers:
        told += _told(part.worker_id, part.entries)
    yield from timeline(told)
    for who, left_out in (("router", answer.left_out), *((part.worker_id, part.left_out) for part in answer.workers)):
        if left_out:
            yield f"{who}: {left_out} more entries between the first and the last ones were not kept"
    for part in answer.workers:
        if part.missing:
            yield f"{part.worker_id}: no part of the story, since {part.missing}"
    if answer.others:
        yield f"older requests with the same id of the client: {', '.join(answer.others)}"


def _told(who: str, entries: Iterable[story_pb2.StoryEntry]) -> Iterator[Told]:
    for entry in entries:
        yield Told(entry.at_s, who, entry.kind, tuple([(field.name, field.value) for field in entry.fields]))


def timeline(told: Iterable[Told]) -> Iterator[str]:
    """Write entries as lines, in the order of their times."""
    ordered = sorted(told, key=lambda entry: entry.at_s)
    width = max((len(entry.who) for entry in ordered), default=0)
    for entry in ordered:
        fields = " ".join(f"{shown(name)}={_value(value)}" for name, value in entry.fields if value != "")
        yield f"{entry.at_s:+10.3f} s  {entry.who:<{width}}  {shown(entry.kind):<13}  {fields}".rstrip()


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text else shown(text)


def shown(text: str) -> str:
    """Return a text that commands a terminal nothing: with control characters it becomes a literal of Python."""
    return text if text.isprintable() else repr(text)
