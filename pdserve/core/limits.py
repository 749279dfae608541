"""Limits that both front ends and the chat templates apply."""

from __future__ import annotations

from typing import Final

MAX_MESSAGES: Final = 4096
"""The most chat messages in one request, and the most parts in one message. The loop waits while a template runs over them."""
