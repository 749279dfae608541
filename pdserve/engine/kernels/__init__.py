"""Triton kernels of the GPU path. Importing this package loads no Triton; its modules, save `paged_kv` and `support`, do."""
