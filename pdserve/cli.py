"""The `pdserve` command. Each command imports its heavy modules only when it runs."""

from __future__ import annotations

import click

from pdserve import __version__
from pdserve.commands.bench.group import bench
from pdserve.commands.capacity.command import capacity
from pdserve.commands.chat import chat
from pdserve.commands.demo import demo
from pdserve.commands.down import down
from pdserve.commands.explain import explain
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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
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
    bench,
    set_budget,
    explain,
    replay,
    demo,
):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="pdserve")
