"""Generate docs/errors.md from the one table of errors, or with --check fail when it is stale."""

from __future__ import annotations

from typing import Final

from pdserve.core.error_table import CLASSES, TABLE, StatusRow
from pdserve.core.errors import ErrorCode
from pdserve.rpc.status import REASON_METADATA, RETRY_AFTER_METADATA, TIMELINE_METADATA
from tools import generated_doc

TARGET: Final = "docs/errors.md"
HEAD: Final = f"""# Errors

Generated from `pdserve/core/error_table.py` by `make docs`; do not edit.

A failed call carries its reason in gRPC's trailing metadata `{REASON_METADATA}` and in `error.code` of an HTTP body (there
OpenAI's own `model_not_found` stands for `unknown_model`, and `context_length_exceeded` for a request that is longer than
the model's context, which is an `invalid_request`). The same word is the label of the metrics
`pdserve_requests_total{{outcome}}`, `pdserve_requests_rejected_total{{reason}}` and `pdserve_retries_total{{reason}}`. Where a
client should try again, `{RETRY_AFTER_METADATA}` (gRPC) or `Retry-After` (HTTP) says after how many seconds. A request that had
been queued tells how far it came: `{TIMELINE_METADATA}`, as JSON, in the trailing metadata, in a header of the HTTP answer, or
as `pdserve` beside `error` in the last event of a stream.

*The cluster* retries by itself, within a request's budget and deadline; what it could not mend reaches the client.
"""
COLUMNS: Final = ("reason", "gRPC", "HTTP", "who retries", "what it means")


def render() -> str:
    """Return the text of the page."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(code, TABLE[code]) for code in ErrorCode)]
    return "\n".join([HEAD, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _row(code: ErrorCode, row: StatusRow) -> tuple[str, ...]:
    meaning = " ".join((CLASSES[code].__doc__ or "").split())
    return f"`{code.value}`", row.grpc, str(row.http), _who(row), meaning


def _who(row: StatusRow) -> str:
    who = [name for name, does in (("the cluster", row.cluster_retries), ("the client", row.client_retries)) if does]
    return ", then ".join(who) or "nobody"


if __name__ == "__main__":
    generated_doc.main(TARGET, render())
