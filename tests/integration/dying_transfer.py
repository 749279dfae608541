"""Runs the worker whose command line follows, with a bug: its transfer thread dies at its first read of a whole prompt.

A probe's read, of a block or two, still passes, so that the worker is placed on.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from kvtransfer.api import TransportRead
from kvtransfer.backends.nixl import NixlTransport

PROMPT_BLOCKS = 4


class DyingTransport(NixlTransport):
    def post_read(self, peer: Any, region: Any, remote: Any, local: Any, into: Any) -> TransportRead:
        if len(local) >= PROMPT_BLOCKS:
            raise ZeroDivisionError("a planted bug")
        return super().post_read(peer, region, remote, local, into)


def main() -> None:
    import kvtransfer.backends.nixl

    _python, _m, module, *arguments = sys.argv[1:]
    kvtransfer.backends.nixl.NixlTransport = DyingTransport  # type: ignore[misc]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
