"""Shipped help for tests: a cluster of real processes without Ray, scripted peers, emptiness checks."""
