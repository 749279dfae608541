"""The requests that a benchmark sends, and their times. Nothing here sends any."""
