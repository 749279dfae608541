"""The base of the deterministic fault simulation: a virtual clock, processes that fail, and a network between them.

`sim.faults` runs the production router, roles, leases, scheduler and links on it. Only time, sockets, the transport and the
model are replaced. One seed decides everything, so the seed and the commit reproduce a failure.
"""
