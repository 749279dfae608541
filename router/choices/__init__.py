"""Requests for several answers: `n`, beams, and the one way in which all front ends consume a generation."""

__all__ = ["beam_search", "deliver"]
