"""The settings of chats: which template makes their prompts, and how calls and reasoning are read from answers.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The part of the router's settings that is about chats."""

    # This file holds the chat template, in Jinja. None takes the model's own.
    chat_template: str | None = None
    # Calls of tools are read from the output in this form: hermes, mistral, llama3_json, deepseek_v3, granite, pythonic, or
    # none. "auto" takes the one whose marks the chat template has.
    tool_call_parser: str = "auto"
    # Reasoning is split from the output in this form: qwen3, deepseek_r1, or none. "auto" takes the one that the chat template
    # asks for.
    reasoning_parser: str = "auto"
