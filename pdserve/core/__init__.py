"""The pure core. It uses the standard library only: no I/O, no clock, no threads, no randomness of its own."""

__all__ = [
    "block_hash",
    "block_pools",
    "blocks",
    "error_table",
    "errors",
    "ids",
    "kv_layout",
    "lease",
    "limits",
    "model_spec",
    "reader",
    "report",
    "request_spec",
    "roofline",
    "sampling",
    "settings",
    "slo",
    "step_plan",
    "structured",
    "worker",
]
