"""Capacity planning: memory, speed, pools and cost of a model on named GPUs, before anything runs. It loads no torch."""

__all__ = ["answer", "devices", "model_source", "placements", "plot", "published", "question", "verdict", "worker_speed"]
