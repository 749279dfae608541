"""Clients of a router's gRPC ports: `ports` for the command line, `blocking`, `asynchronous` and `llm` for programs."""

from pdserve.client.ports import CALL_TIMEOUT_S, OPTIONS, AdminClient, Answer, CallFailed, InferenceClient, Stream

__all__ = ["CALL_TIMEOUT_S", "OPTIONS", "AdminClient", "Answer", "CallFailed", "InferenceClient", "Stream"]
