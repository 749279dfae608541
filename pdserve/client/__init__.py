"""Clients of a router's gRPC ports: `command_line` for the command line, `blocking`, `asynchronous` and `llm` for programs."""

from pdserve.client.command_line import CALL_TIMEOUT_S, OPTIONS, AdminClient, Answer, CallFailed, InferenceClient, PrintedStream

__all__ = [
    "CALL_TIMEOUT_S",
    "OPTIONS",
    "AdminClient",
    "Answer",
    "CallFailed",
    "InferenceClient",
    "PrintedStream",
    "asynchronous",
    "blocking",
    "command_line",
    "llm",
    "own_cluster",
    "params",
    "results",
    "retries",
]
