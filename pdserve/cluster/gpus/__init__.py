"""The assignment of GPUs, or of shares of one, to workers."""
