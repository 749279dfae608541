"""OpenAI's API as pdserve speaks it: it reads requests and writes answers and stream chunks. It has no sockets."""

__all__ = ["body", "chunks", "echo", "json", "logprobs", "model_limits", "prompt", "request", "responses", "tokenization"]
