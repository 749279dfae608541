"""A whole cluster of production objects on a virtual clock, with faults drawn from a seed."""
