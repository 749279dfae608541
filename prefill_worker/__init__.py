"""The prefill role: computes prompts and lends their KV blocks under leases."""
