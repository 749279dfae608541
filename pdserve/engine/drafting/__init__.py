"""Drafters, which guess the next tokens of sequences, and the choice of the drafts that are worth a place in a step."""
