"""`python -m pdserve.checkpoint MODEL`: make a model ready, with a progress bar, and print its directory."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pdserve.checkpoint.resolve import resolve
from pdserve.core.errors import ConfigError


@click.command()
@click.argument("model", default="default")
def main(model: str) -> None:
    """Make MODEL ready and print its directory.

    MODEL is "default", "tiny", a directory, a .gguf file, or a Hugging Face id.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(model, total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total)

        try:
            directory = resolve(model, progress=show)
        except ConfigError as exc:
            raise click.ClickException(exc.message) from exc
        bars.update(bar, description=f"{model} is ready", completed=1, total=1)
    click.echo(directory)


if __name__ == "__main__":
    main()
