"""The ways to compute attention over paged KV: by torch, fast or batch-invariant, and by Triton."""
