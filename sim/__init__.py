"""Simulators. `world` has a clock, a network and processes that are simulated, `faults` searches for broken promises in it, and
`perf` tells what a cluster of many workers attains and costs. None of them is part of what users install."""
