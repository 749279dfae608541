"""Simulators. `world` has a clock, a network and processes that are simulated, `faults` searches for broken promises in it, and
`perf` computes what a cluster of many workers attains and costs. Users do not install the simulators."""
