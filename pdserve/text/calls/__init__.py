"""Calls of tools, and reasoning, in the text that a model writes. Nothing here knows tokens, requests or wire formats."""
