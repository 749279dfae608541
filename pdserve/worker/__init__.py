"""The parts that both roles share: the engine thread, the link to the router, and the life of a worker process.

A worker has three threads. The *loop* thread owns RPC, timers and request bookkeeping; the *engine* thread owns
scheduler, block pool and model; the *transfer* thread owns the transport. They exchange immutable messages through
bounded queues and `call_soon_threadsafe`, and share no mutable object. A decode worker whose peers store KV in another dtype
has a fourth one, which converts it.
"""

__all__ = [
    "engine",
    "engine_thread",
    "host",
    "link",
    "member",
    "messages",
    "openengine",
    "own_engine",
    "prefix_log",
    "process",
    "start_report",
    "vllm",
]
