"""Limits that both front ends and the chat templates know."""

from __future__ import annotations

from typing import Final

MAX_MESSAGES: Final = 4096
"""Chat messages of one request, and parts of one message. A template runs over each of them while the loop waits."""
