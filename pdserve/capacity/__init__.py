"""Capacity planning: memory, speed, pools and cost of a model on named GPUs, before anything runs. It loads no torch."""
