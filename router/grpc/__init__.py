"""The gRPC front ends: inference for clients, administration for operators."""

__all__ = ["admin", "front"]
