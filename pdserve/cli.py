"""The `pdserve` command. Each command imports its heavy modules only when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Final

import click

from pdserve import __version__
from pdserve.commands.capacity.command import capacity
from pdserve.commands.chat import chat
from pdserve.commands.demo import demo
from pdserve.commands.down import down
from pdserve.commands.explain import explain
from pdserve.commands.failures import FAILED, report
from pdserve.commands.generate import generate
from pdserve.commands.models import models
from pdserve.commands.replay import replay
from pdserve.commands.scaling.drain import drain
from pdserve.commands.scaling.flip import flip
from pdserve.commands.scaling.plan import plan
from pdserve.commands.scaling.scale import scale
from pdserve.commands.set_budget import set_budget
from pdserve.commands.status import status
from pdserve.commands.up import up

BENCH: Final = "bench"


class _Commands(click.Group):
    """The commands, with `bench` from a distribution of its own, which is looked for only when it is shown or run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the alphabet."""
        return sorted([*self.commands, BENCH])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name. Without its distribution, `bench` says how to get it."""
        if cmd_name != BENCH:
            return super().get_command(ctx, cmd_name)
        for found in entry_points(group="pdserve.commands", name=BENCH):
            command: click.Command = found.load()
            return command
        return bench_is_missing


@click.command(
    BENCH,
    short_help="Measure a cluster, find its best layout, get a verdict.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bench_is_missing(args: tuple[str, ...]) -> None:
    """Say how to get the command."""
    sys.exit(report("`pdserve bench` is not installed: run `pip install 'pdserve[bench]'`", FAILED))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="pdserve")
def main() -> None:
    """Serve a language model from a prefill pool and a decode pool."""


for command in (
    up,
    down,
    generate,
    chat,
    status,
    drain,
    flip,
    scale,
    plan,
    capacity,
    models,
    set_budget,
    explain,
    replay,
    demo,
):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="pdserve")
