"""A gang: several processes, its ranks, that compute one model together. Rank 0 is a worker's process, and starts the others.

The scheduler, the link, leases and transfers belong to rank 0. The other ranks compute its steps and answer nothing. All of
them have mapped the memory in which they meet, and the KV pool, whose blocks look as those of one process do: each rank writes
and reads its heads of its layers there. So nobody else knows of ranks: neither a ticket nor a reader of blocks.
"""
