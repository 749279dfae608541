"""Benchmarks of a running cluster: measure a workload, find the best layout of the workers for it, and say so on one page."""

__version__ = "0.1.0"
