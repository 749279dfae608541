"""`pdserve replay`: give the events of a recording to a new router core, and compare what it decides."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.explain import Told, shown, timeline
from pdserve.commands.failures import FAILED, one_line_errors

if TYPE_CHECKING:
    from pdserve.config import RouterConfig
    from router.core.live_request import RequestStory
    from router.core.policy import Rankings
    from router.recording.replay import Difference, Replay


@click.command(short_help="Let a router decide a recording again.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--request", "request_id", metavar="ID", help="Print the story of this request as well.")
@click.option("--own-policies", is_flag=True, help="Import the placement policies that the recording names, if not built in.")
@one_line_errors
def replay(file: Path, request_id: str | None, own_policies: bool) -> int:
    """Replay FILE, which `pdserve up --record FILE` wrote, and exit with 1 if the router would now decide differently.

    Policies of the operator's own are code. Import them only for a recording whose writer you trust.
    """
    from pdserve.core.errors import InvalidRequest
    from router.recording.replay import lines_of
    from router.recording.replay import replay as replay_lines

    try:
        with file.open("rb") as opened:
            result = replay_lines(lines_of(opened), functools.partial(_rankings, own=own_policies))
    except OSError as exc:
        raise InvalidRequest(f"cannot read {file}: {exc.strerror}", field="recording") from exc
    if result.difference is not None:
        _show_difference(result, result.difference)
        return FAILED
    end = shown(result.end) or "it has no last line, so the router was killed or still runs"
    click.echo(f"{result.events} events, effects equal; the recording ends: {end}")
    if request_id is not None:
        for story in result.story(request_id):
            _show(story)
    return 0


def _rankings(config: RouterConfig, *, own: bool) -> Rankings:
    from pdserve.core.errors import InvalidRequest
    from router.service.policies import BUILTINS, rankings_of

    for name in (config.prefill_policy, config.decode_policy):
        if name not in BUILTINS and not own:
            raise InvalidRequest(f"names the policy {name!r}, which --own-policies would import", field="recording")
    return rankings_of(config, lambda role, reason: None)


def _show_difference(result: Replay, difference: Difference) -> None:
    from pdserve import __version__
    from pdserve.core.errors import UnknownRequest

    where = f"line {difference.line}, {difference.now_s:.3f} s, effect {difference.position}"
    click.echo(f"{result.events} events, effects equal; then they differ at {where}")
    click.echo(f"recorded by pdserve {shown(result.recorded_by)}, replayed by {__version__}")
    click.echo(f"event     {_compact(difference.event)}")
    click.echo(f"recorded  {_compact(difference.recorded)}")
    click.echo(f"replayed  {_compact(difference.replayed)}")
    if difference.request_id:
        try:
            _show(result.story(difference.request_id)[0])
        except UnknownRequest:  # a probe, or a request that was refused, has no story
            click.echo(f"request {shown(difference.request_id)}: no story")


def _show(story: RequestStory) -> None:
    outcome = "not ended" if story.outcome is None else story.outcome.value
    click.echo(f"request {shown(story.request_id)}: {outcome}")
    for line in timeline(Told(e.at_s - story.arrived_s, "router", e.kind, e.fields) for e in story.entries):
        click.echo(line)


def _compact(plain: dict[str, Any] | None) -> str:
    return "nothing" if plain is None else json.dumps(plain, separators=(",", ":"))
