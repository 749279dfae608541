"""Commands about the workers of the pools: how many there are, who leaves, and who changes its role."""
