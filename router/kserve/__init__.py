"""The Open Inference Protocol (KServe's v2) as pdserve speaks it: the tensors of requests and answers. It has no sockets."""

__all__ = ["answer", "request", "signature"]
