"""Structured output: constraints become grammars, and these say which tokens may come next. It loads no torch."""

__all__ = ["checker", "child", "compilations", "compiler", "grammar_text", "state", "vocabulary"]
