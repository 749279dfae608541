"""Public clients against a live cluster: each in its own environment, judged by its own report."""
