"""Calls of tools, and reasoning, in the text that a model writes. Nothing here knows tokens, requests or wire formats."""

__all__ = ["events", "forced", "forms", "grammar", "marks", "output", "reasoning", "registry"]
