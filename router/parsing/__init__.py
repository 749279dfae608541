"""Reading of large requests in a child process, so that a hostile one holds up nobody."""

__all__ = ["generate", "infer", "parser", "unparsed", "vllm_engine"]
