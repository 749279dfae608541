"""The memory of a machine or device, and the share of it that the KV pool gets."""
