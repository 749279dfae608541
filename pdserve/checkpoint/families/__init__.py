"""Families of models: from a published configuration and published tensor names to a `ModelSpec` and its parts. Pure."""
