"""The search of a verdict: `pdserve bench goodput` on the running cluster, or on one that is started for it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from pdserve.client.own_cluster import OwnCluster
from pdserve.commands.failures import INTERRUPTED
from pdserve_bench.commands.goodput import TEMPORARY, UNFINISHED, goodput

TERMINATED: Final = 143  # 128 + SIGTERM, as shells report it


def searched(
    flags: Sequence[str], result_file: Path, workers: int | None, config: Path | None, *, quiet: bool, kept: bool
) -> bool:
    """Search with the flags of `pdserve bench goodput`, and keep the result. Return whether Ctrl-C ended the search.

    workers: the size of a cluster that is started for it. None: the cluster runs already. quiet: standard output is left free,
    and progress goes to standard error. kept: the result file outlasts the verdict. A search that failed ends the process
    with its own status; one that is not complete has a result nevertheless.
    """
    arguments = [*flags, "--result-file", str(result_file)]
    aside = contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext()
    with aside:
        if workers is None:
            status = _run(arguments, kept)
        else:
            with _terminable(), OwnCluster(workers // 2, workers - workers // 2, config) as cluster:
                addresses = ["--address", cluster.address, "--admin-address", cluster.admin_address]
                status = _run([*arguments, *addresses], kept)
    if status not in (0, UNFINISHED, INTERRUPTED) or not result_file.exists():
        sys.exit(status)
    return status == INTERRUPTED


def _run(arguments: list[str], kept: bool) -> int:
    """Run the command in this process and return its exit status. click reports wrong flags by itself."""
    try:
        goodput.main(args=arguments, prog_name="pdserve bench verdict", standalone_mode=False, obj=None if kept else TEMPORARY)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the cluster is stopped."""

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
