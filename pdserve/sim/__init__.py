"""Deterministic fault simulation: the production router, roles, leases, scheduler and links on a virtual clock.

Only what touches the world is replaced: time, sockets, the transport and the model. One seed decides everything, so a
failure is reproduced by its seed and the commit.
"""
