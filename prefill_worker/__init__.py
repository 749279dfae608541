"""The prefill role: it computes prompts and lends their KV blocks under leases."""
