"""Triton kernels of the GPU path. Importing this package loads no Triton; each of its modules except `support` loads it."""
