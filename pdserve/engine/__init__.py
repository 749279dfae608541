"""The engine: it computes the steps that the scheduler plans, and draws the tokens."""

__all__ = [
    "attention",
    "block_sums",
    "drafting",
    "gang",
    "kernels",
    "kv",
    "loading",
    "memory",
    "models",
    "native",
    "numerics",
    "peaks",
    "runner",
    "sampler",
    "schedule",
    "warm_up",
    "ways",
]
