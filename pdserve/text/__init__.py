"""Text and token ids: the tokenizer, chat templates, and the text of an output. It loads no torch."""

__all__ = ["calls", "chat", "output", "plain_json", "tokenizer"]
